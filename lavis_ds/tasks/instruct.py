"""Next-token prediction on the labelled tokens: pre-training, captioning and instruction tuning alike."""

from __future__ import annotations

from torch import nn

from lavis_ds.batch import Batch
from lavis_ds.tasks.base import EvalContext, EvalOutput, Forward, StepOutput, Task
from lavis_ds.tasks.configs import InstructConfig


class InstructTask(Task):
    """Trains on the sum of token losses; evaluation gives `loss` and `token_accuracy`."""

    Config = InstructConfig

    def train_step(self, forward: Forward, batch: Batch) -> StepOutput:
        loss_sum, num_correct, *_ = forward(batch)
        return StepOutput(loss_sum, {"train/token_accuracy": (num_correct, batch.num_targets)})

    def eval_step(self, model: nn.Module, batch: Batch, context: EvalContext) -> EvalOutput:
        loss_sum, num_correct, *_ = model(batch)
        return EvalOutput(
            {"loss": (float(loss_sum), batch.num_targets), "token_accuracy": (float(num_correct), batch.num_targets)}
        )
