"""Exact learning rates, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lavis_ds import registry
from lavis_ds.config.schema import RunConfig
from lavis_ds.optim.schedules import ScheduleShape, constant, cosine, linear
from lavis_ds.runners.build import schedule

SHAPE = ScheduleShape(init_lr=1.0, min_lr=0.2, warmup_lr=0.1, warmup_steps=3, total_steps=11)
"""Warm-up of 3 steps, then 8 to the end."""

WARMUP = [0.1 + 0.9 / 3, 0.1 + 1.8 / 3, 1.0]


@pytest.mark.parametrize("function", [constant, linear, cosine])
def test_warm_up_moves_at_step_0_and_ends_at_the_peak(function: object) -> None:
    values = [function(step, SHAPE) for step in range(4)]  # type: ignore[operator]
    assert values == pytest.approx([*WARMUP, 1.0], abs=1e-15)


def test_constant_stays() -> None:
    assert [constant(step, SHAPE) for step in (3, 7, 10, 11)] == [1.0] * 4


def test_linear() -> None:
    values = [linear(step, SHAPE) for step in (3, 5, 7, 10, 11)]
    assert values == pytest.approx([1.0, 0.8, 0.6, 0.3, 0.2], abs=1e-15)


def test_cosine() -> None:
    values = [cosine(step, SHAPE) for step in (3, 5, 7, 9, 11)]
    quarter = math.sqrt(0.5)  # cos(pi / 4)
    assert values == pytest.approx([1.0, 0.6 + 0.4 * quarter, 0.6, 0.6 - 0.4 * quarter, 0.2], abs=1e-15)


@pytest.mark.parametrize("function", [linear, cosine])
def test_past_the_end_it_stays_at_the_minimum(function: object) -> None:
    assert function(99, SHAPE) == pytest.approx(0.2, abs=1e-15)  # type: ignore[operator]


@pytest.mark.parametrize("function", [constant, linear, cosine])
def test_no_warm_up_starts_at_the_peak(function: object) -> None:
    shape = dataclasses.replace(SHAPE, warmup_steps=0, total_steps=1)
    assert function(0, shape) == 1.0  # type: ignore[operator]


@pytest.mark.parametrize("function", [constant, linear, cosine])
def test_warm_up_longer_than_the_run_only_warms_up(function: object) -> None:
    shape = dataclasses.replace(SHAPE, warmup_steps=20)
    assert function(10, shape) == pytest.approx(0.1 + 0.9 * 11 / 20, abs=1e-15)  # type: ignore[operator]


def run(**options: object) -> RunConfig:
    return RunConfig.model_validate({"max_steps": 8, "batch_size_train": 1, "init_lr": 1.0, **options})


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("linear_warmup_cosine_lr", cosine),
        ("linear_warmup_cosine_lr_step-wise", cosine),
        ("constant_lr", constant),
        ("cosine", cosine),
        ("linear", linear),
        ("constant", constant),
    ],
)
def test_names_of_ours_and_of_lavis(name: str, function: object) -> None:
    chosen, shape = schedule(run(lr_sched=name), 8)
    assert chosen is function
    assert chosen is registry.lr_schedulers.get(name)
    assert shape.init_lr == 1.0


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"warmup_ratio": 0.25}, 2), ({"warmup_steps": 3}, 3), ({}, 0), ({"warmup_steps": 0}, 0)],
)
def test_length_of_the_warm_up(options: dict[str, object], steps: int) -> None:
    assert schedule(run(**options), 8)[1].warmup_steps == steps


def test_accumulation_does_not_enter() -> None:
    small, large = (schedule(run(accum_grad_iters=n, warmup_ratio=0.25), 8) for n in (1, 16))
    assert [small[0](s, small[1]) for s in range(8)] == [large[0](s, large[1]) for s in range(8)]


def test_one_epoch_still_decays() -> None:
    """LAVIS's cosine moves once an epoch, so with `max_epoch: 1` it never does."""
    one_epoch = run(max_steps=None, max_epoch=1, min_lr=0.1)
    function, shape = schedule(one_epoch, 100)
    values = [function(step, shape) for step in range(100)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0
    assert values[50] == pytest.approx(0.55, abs=1e-15)
    assert values[99] == pytest.approx(0.1, abs=3e-4)  # the last step is one before the end: off by 2.2e-4
