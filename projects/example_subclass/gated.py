"""A model and a task of one's own: a learned gate on the picture's tokens, and a penalty that pulls it towards 1."""

import torch
from pydantic import Field
from torch import Tensor

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.vlm import Vlm
from lavis_ds.tasks.base import Forward, StepOutput
from lavis_ds.tasks.configs import InstructConfig
from lavis_ds.tasks.instruct import InstructTask


class GatedVlmConfig(VlmConfig):
    arch: str = "gated_vlm"
    gate_init: float = Field(0.5, description="gate before training; 1 passes the picture's tokens on unchanged")


@registry.register_model("gated_vlm")
class GatedVlm(Vlm):
    Config = GatedVlmConfig

    def __init__(self, config: GatedVlmConfig) -> None:
        super().__init__(config)
        self.gate = torch.nn.Parameter(torch.tensor([config.gate_init]))

    def encode_images(self, images_N3HW: Tensor) -> Tensor:
        return super().encode_images(images_N3HW) * self.gate

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        return (*super().forward(batch), self.gate.float().squeeze())


class GatePenaltyConfig(InstructConfig):
    name: str = "gate_penalty"
    weight: float = Field(0.01, ge=0, description="factor of the penalty in the loss")


@registry.register_task("gate_penalty")
class GatePenaltyTask(InstructTask):
    Config = GatePenaltyConfig
    config: GatePenaltyConfig

    def train_step(self, forward: Forward, batch: Batch) -> StepOutput:
        outputs = forward(batch)
        gate, count = outputs[-1], batch.target_weight
        output = self.token_loss(outputs, batch)
        output = output.with_loss("train/gate_penalty", (gate - 1) ** 2, weight=self.config.weight, count=count)
        return output.with_metric("train/gate", gate, count=count)
