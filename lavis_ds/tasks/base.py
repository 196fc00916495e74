"""What a task is: how a batch becomes a loss, and how predictions become scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.config.schema import TaskConfig
from lavis_ds.data.conversation import Conversation

Forward = Callable[[Batch], tuple[Tensor, ...]]
"""A forward pass with gradients: the engine."""


@dataclass(frozen=True)
class StepOutput:
    """What a micro-batch gives the loop.

    Attributes:
        loss_sum: scalar, the SUM over this micro-batch's targets. The loop divides by the targets of the global batch.
        metrics: name -> (sum, count); the loop sums both over micro-batches and ranks, then divides.
    """

    loss_sum: Tensor
    metrics: Mapping[str, tuple[Tensor | float, float]] = field(default_factory=dict)

    def with_loss(self, name: str, mean: Tensor, weight: float, count: float) -> StepOutput:
        """Add a further loss that is a mean over this micro-batch.

        Args:
            name: metric it is reported under, unweighted.
            mean: scalar.
            weight: its factor in the total loss.
            count: what it is a mean over; pass the batch's `target_weight` to average it as the token loss is.
        """
        return replace(self.with_metric(name, mean, count), loss_sum=self.loss_sum + weight * count * mean)

    def detached(self) -> StepOutput:
        """Its numbers without what they were made of."""
        metrics = {
            name: (total.detach() if isinstance(total, Tensor) else total, count)
            for name, (total, count) in self.metrics.items()
        }
        return StepOutput(self.loss_sum.detach(), metrics)

    def with_metric(self, name: str, mean: Tensor, count: float) -> StepOutput:
        """Add a metric that is a mean over `count` things."""
        return replace(self, metrics={**self.metrics, name: (mean.detach() * count, count)})


@dataclass(frozen=True)
class EvalOutput:
    """What an evaluation batch gives.

    Attributes:
        sums: name -> (sum, count), added up over batches and ranks.
        predictions: one JSON-able record a sample, fillers left out.
    """

    sums: Mapping[str, tuple[float, float]]
    predictions: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class EvalContext:
    """What evaluation needs besides model and batch.

    Attributes:
        synced: every rank must run the model the same number of times (ZeRO-3).
        stop_ids: ids that end a generated answer.
        decode: generated ids -> the answer's text.
    """

    synced: bool
    stop_ids: tuple[int, ...]
    decode: Callable[[list[int]], str]


class Task(ABC):
    """Subclass, set `Config`, register with `@registry.register_task("name")`.

    Attributes:
        eval_batches: `labelled` batches are as in training; `prompts` end where the last answer would begin, padded on
            the left, ready to be continued.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    eval_batches: ClassVar[Literal["labelled", "prompts"]] = "labelled"

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def train_step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Loss of one micro-batch."""

    @abstractmethod
    def eval_step(self, model: nn.Module, batch: Batch, context: EvalContext) -> EvalOutput:
        """Evaluate one batch, a batch as `eval_batches` says, with the bare model and without gradients."""

    @property
    def compares_with_training(self) -> bool:
        """Whether `baselines` wants the training split's conversations."""
        return False

    def baselines(self, training: Iterable[Conversation], evaluated: Iterable[Conversation]) -> Mapping[str, float]:
        """Scores that a metric should be seen beside, as `baseline/<name>/<metric>`; none unless a task knows some."""
        return {}

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Totals over the whole split -> metrics; means unless a task knows better."""
        return {name: total / count for name, (total, count) in sorted(sums.items()) if count}
