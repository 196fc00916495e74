"""The optimizer that `run.optimizer` asks for, of those that update weights where the gradients are."""

from __future__ import annotations

from typing import Any

import torch

from lavis_ds.config.schema import RunConfig
from lavis_ds.optim.adamw import adamw
from lavis_ds.optim.muon import Muon
from lavis_ds.optim.stochastic_rounding import StochasticAdamW


def build(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """The optimizer over `groups` (dicts with `params`, `lr_scale` and `weight_decay`)."""
    options = run.optimizer
    if options.name == "muon":
        return Muon(groups, lr=run.init_lr, betas=options.betas, eps=options.eps, momentum=options.momentum)
    if options.name == "adamw_8bit":
        return _adamw_8bit(groups, run)
    if options.stochastic_rounding:
        return StochasticAdamW(groups, lr=run.init_lr, betas=options.betas, eps=options.eps)
    return adamw(groups, run)


def _adamw_8bit(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit  # optional, and takes seconds to import

    made: torch.optim.Optimizer = AdamW8bit(groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps)
    return made
