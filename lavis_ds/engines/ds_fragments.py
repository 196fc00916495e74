"""Where DeepSpeed's optimizers keep a rank's stretch of each parameter, by ZeRO stage.

Read from the sources of deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py,
runtime/fp16/unfused_optimizer.py and utils/tensor_fragment.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lavis_ds.engines.fragments import Fragment, moments_of, whole


def fragments(
    module: nn.Module, optimizer: Any, base: torch.optim.Optimizer, rank: int, size: int
) -> Iterator[Fragment]:
    """All that this rank holds of the trainable parameters.

    Args:
        module: the model.
        optimizer: what DeepSpeed made of `base`.
        base: the optimizer that updates weights.
        rank: of this process among those that see different data.
        size: their number.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _partitioned(named, optimizer, base, rank)
    elif hasattr(optimizer, "_link_all_hp_params"):
        yield from _flattened(named, optimizer, base)
    elif hasattr(optimizer, "fp32_groups"):
        yield from _copied(named, optimizer, base, rank, size)
    else:
        yield from whole(named, base, rank=rank, world_size=size)


def _partitioned(
    named: list[tuple[str, Any]], optimizer: Any, base: torch.optim.Optimizer, rank: int
) -> Iterator[Fragment]:
    """ZeRO-3: each parameter is cut into as many stretches as there are ranks, the last ones padded."""
    for name, parameter in named:
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * parameter.partition_numel()
        numel = min(parameter.partition_numel(), parameter.ds_numel - start)
        if numel > 0:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield _stretch(name, start, parameter.ds_shape, flat, offset, numel, base)


def _flattened(named: list[tuple[str, Any]], optimizer: Any, base: torch.optim.Optimizer) -> Iterator[Fragment]:
    """ZeRO-1 and 2, and bf16 with float32 gradients below: a group's parameters end to end, cut at any place."""
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flats is None:
        flats = optimizer.fp32_groups_flat_partition
    for name, parameter in named:
        mapping = parameter._hp_mapping
        if mapping is not None:  # else none of it is on this rank
            at, held = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = flats[mapping.param_group_index]
            yield _stretch(name, at.start, parameter.shape, flat, held.start, held.numel, base)


def _stretch(
    name: str, start: int, shape: torch.Size, flat: Any, offset: int, numel: int, base: torch.optim.Optimizer
) -> Fragment:
    state = moments_of(base, flat)
    moments = {kind: value.narrow(0, offset, numel) for kind, value in state.items() if kind != "step"}
    return Fragment(name, start, shape, flat.detach().narrow(0, offset, numel), moments, state)


def _copied(
    named: list[tuple[str, Any]], optimizer: Any, base: torch.optim.Optimizer, rank: int, size: int
) -> Iterator[Fragment]:
    """Stage 0 in 16 bits: a whole float32 copy of each parameter on every rank."""
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    copies = {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
    yield from whole(named, base, rank=rank, world_size=size, copies=copies)
