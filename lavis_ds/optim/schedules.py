"""Learning-rate schedules: lr = f(optimizer step), nothing else. No state, so a resumed run continues exactly.

Every schedule warms up linearly from `warmup_lr` to `init_lr` in `warmup_steps`, then runs to `min_lr` at
`total_steps`.
Register another with `@registry.register_lr_scheduler("name")` on a function of the same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleShape:
    """The numbers a schedule depends on; learning rates have no unit, steps are optimizer steps."""

    init_lr: float
    min_lr: float
    warmup_lr: float
    warmup_steps: int
    total_steps: int


Schedule = Callable[[int, ScheduleShape], float]


def _warmup(step: int, shape: ScheduleShape) -> float | None:
    """The learning rate during warm-up, else None. Step 0 already moves, so that no step is wasted at lr 0."""
    if step >= shape.warmup_steps:
        return None
    return shape.warmup_lr + (shape.init_lr - shape.warmup_lr) * (step + 1) / shape.warmup_steps


def _progress(step: int, shape: ScheduleShape) -> float:
    """Share of the steps after warm-up that are done, in [0, 1]."""
    return min(1.0, (step - shape.warmup_steps) / max(1, shape.total_steps - shape.warmup_steps))


def constant(step: int, shape: ScheduleShape) -> float:
    """Warm-up, then `init_lr`."""
    warming = _warmup(step, shape)
    return shape.init_lr if warming is None else warming


def linear(step: int, shape: ScheduleShape) -> float:
    """Warm-up, then a straight line to `min_lr`."""
    warming = _warmup(step, shape)
    return shape.init_lr + (shape.min_lr - shape.init_lr) * _progress(step, shape) if warming is None else warming


def cosine(step: int, shape: ScheduleShape) -> float:
    """Warm-up, then half a cosine to `min_lr` (Loshchilov & Hutter, https://arxiv.org/abs/1608.03983)."""
    warming = _warmup(step, shape)
    if warming is not None:
        return warming
    return shape.min_lr + (shape.init_lr - shape.min_lr) * 0.5 * (1 + math.cos(math.pi * _progress(step, shape)))
