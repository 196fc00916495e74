"""Sums, not means: what a step's output adds up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lavis_ds.config.schema import TaskConfig
from lavis_ds.tasks.base import EvalOutput, StepOutput, Task


def test_with_loss_adds_weight_times_count_times_mean() -> None:
    token_loss = torch.tensor(10.0, requires_grad=True)
    balance = torch.tensor(0.5, requires_grad=True)
    output = StepOutput(token_loss).with_loss("train/balance", balance, weight=0.1, count=4)
    assert output.loss_sum.item() == pytest.approx(10.0 + 0.1 * 4 * 0.5)
    output.loss_sum.backward()
    assert (float(token_loss.grad), float(balance.grad)) == (1.0, pytest.approx(0.4))  # type: ignore[arg-type]


def test_the_metric_of_a_loss_is_unweighted_and_detached() -> None:
    balance = torch.tensor(0.5, requires_grad=True)
    total, count = StepOutput(torch.tensor(10.0)).with_loss("a", balance, weight=0.1, count=4).metrics["a"]
    assert (float(total), count) == (2.0, 4)
    assert isinstance(total, torch.Tensor)
    assert not total.requires_grad


def test_a_further_loss_averages_over_micro_batches_as_the_token_loss_does() -> None:
    """Two micro-batches of 3 and 1 targets: the mean over 4 targets, not the mean of means."""
    outputs = [
        StepOutput(torch.tensor(3.0)).with_loss("a", torch.tensor(1.0), weight=2.0, count=3),
        StepOutput(torch.tensor(1.0)).with_loss("a", torch.tensor(5.0), weight=2.0, count=1),
    ]
    total = sum(float(o.loss_sum) for o in outputs) / 4
    assert total == pytest.approx((3 + 1) / 4 + 2.0 * (3 * 1.0 + 1 * 5.0) / 4)


def test_with_metric_leaves_the_loss_and_other_metrics_alone() -> None:
    first = StepOutput(torch.tensor(10.0), {"a": (1.0, 2)})
    output = first.with_metric("b", torch.tensor(0.25), count=8)
    assert float(output.loss_sum) == 10.0
    assert output.metrics["a"] == (1.0, 2)
    assert float(output.metrics["b"][0]) == 2.0
    assert set(first.metrics) == {"a"}


class Counting(Task):
    def train_step(self, forward: Any, batch: Any) -> StepOutput:
        raise NotImplementedError

    def eval_step(self, model: Any, batch: Any, context: Any) -> EvalOutput:
        raise NotImplementedError


def test_summarize_gives_means_and_leaves_out_what_nothing_counts() -> None:
    task = Counting(TaskConfig(name="counting"))
    assert task.summarize({"loss": (6.0, 4), "accuracy/none": (0.0, 0), "accuracy": (3.0, 4)}) == {
        "accuracy": 0.75,
        "loss": 1.5,
    }


def test_a_task_knows_no_baselines_unless_it_says_so() -> None:
    task = Counting(TaskConfig(name="counting"))
    assert task.compares_with_training is False
    assert task.baselines([], []) == {}
