"""What an optimizer keeps of each weight, whichever optimizer it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lavis_ds.optim.muon import Muon
from lavis_ds.optim.stochastic_rounding import StochasticAdamW

BLOCK = 256
"""Neighbours that share a scale in 8-bit moments (bitsandbytes)."""

_SCALES = {"absmax1": "state1", "absmax2": "state2"}
_CONSTANTS = frozenset({"step", "qmap1", "qmap2"})


def state_of(optimizer: torch.optim.Optimizer, held: Tensor) -> dict[str, Any]:
    """The state of what the optimizer updates, which is made as its first step would make it where there is none."""
    if not optimizer.state.get(held):
        _allocate(optimizer, held)
    state: dict[str, Any] = optimizer.state[held]
    return state


def _allocate(optimizer: torch.optim.Optimizer, held: Tensor) -> None:
    if isinstance(optimizer, StochasticAdamW) or (isinstance(optimizer, Muon) and optimizer.is_by_muon(held)):
        optimizer.allocate(held)
    elif hasattr(optimizer, "init_state"):
        _allocate_8bit(optimizer, held)
    else:
        is_fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        step = torch.zeros((), dtype=torch.float32, device=held.device if is_fused else "cpu")
        optimizer.state[held] = {"step": step if isinstance(optimizer, torch.optim.AdamW) else 0} | {
            name: torch.zeros_like(held, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")
        }


def _allocate_8bit(optimizer: Any, held: Tensor) -> None:
    """By bitsandbytes, which looks the parameter up in a group; ZeRO's groups are empty between steps."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[0], "params": [held]}]
    try:
        optimizer.init_state(optimizer.param_groups[0], held, 0, 0)
    finally:
        optimizer.param_groups = groups


def moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """What has an element for each weight."""
    return {name: value for name, value in state.items() if name not in _CONSTANTS | _SCALES.keys()}


def scales(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What has an element for each `BLOCK` of weights."""
    return {name: state[name] for name in _SCALES if name in state}
