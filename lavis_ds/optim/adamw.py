"""AdamW as the engines use it, and the one place where a learning rate reaches an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lavis_ds.config.schema import RunConfig

NO_FACTORS: Mapping[str, float] = MappingProxyType({})


def adamw(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.AdamW:
    """PyTorch's fused AdamW over `groups` (dicts with `params`, `lr_scale` and `weight_decay`)."""
    return torch.optim.AdamW(groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps, fused=True)


def scale_learning_rates(
    optimizer: torch.optim.Optimizer, lr: float, factors: Mapping[str, float] = NO_FACTORS
) -> None:
    """Give every group the schedule's `lr` times its own `lr_scale`, and times what `factors` has for its name."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0) * factors.get(group.get("name", ""), 1.0)
