"""Next-token prediction on the labelled tokens: pre-training, captioning and instruction tuning alike."""

from __future__ import annotations

from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.tasks.base import EvalContext, EvalOutput, Forward, StepOutput, Task
from lavis_ds.tasks.configs import InstructConfig


class InstructTask(Task):
    """Trains on the sum of token losses; evaluation gives `loss` and `token_accuracy`."""

    Config = InstructConfig

    def train_step(self, forward: Forward, batch: Batch) -> StepOutput:
        return self.token_loss(forward(batch), batch)

    def token_loss(self, outputs: tuple[Tensor, ...], batch: Batch) -> StepOutput:
        """Loss and metrics from a model's outputs; a task with further losses adds them to this.

        With several datasets each has its loss as `train/loss/<name>`.
        """
        loss_sum, num_correct, losses_D, *_ = outputs
        metrics: dict[str, tuple[Tensor | float, float]] = {"train/token_accuracy": (num_correct, batch.num_targets)}
        if len(batch.by_dataset) > 1:
            for counts, loss in zip(batch.by_dataset, losses_D, strict=True):
                metrics[f"train/loss/{counts.name}"] = (loss, counts.target_weight)
        return StepOutput(loss_sum, metrics)

    def eval_step(self, model: nn.Module, batch: Batch, context: EvalContext) -> EvalOutput:
        loss_sum, num_correct, *_ = model(batch)
        return EvalOutput(
            {"loss": (float(loss_sum), batch.target_weight), "token_accuracy": (float(num_correct), batch.num_targets)}
        )
