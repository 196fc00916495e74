"""With ZeRO the parameters of a layer are bundles: few for DeepSpeed, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.multi.launch import run_ranks

RUN: dict[str, Any] = {
    "output_dir": "unused", "max_steps": 2, "init_lr": 1e-2, "precision": "fp32", "grad_clip": None,
    "weight_decay": 0.0, "global_batch_size": 4, "batch_size_train": 1,
}  # fmt: skip
ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 9000}
"""Buckets are reduced in the middle of the backward pass."""

MICRO_BATCHES = 2


class Model(nn.Module):
    """A decoder of transformers, part of which is frozen."""

    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = AutoConfig.for_model("qwen3", **shape, head_dim=16, num_hidden_layers=3, vocab_size=64)  # type: ignore[no-untyped-call]
        torch.manual_seed(0)
        self.lm: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        if recomputed:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.lm.model.layers[1].mlp.requires_grad_(False)
        self.lm.model.layers[2].unused = nn.Linear(8, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.lm(ids, labels=ids, use_cache=False).loss,)


def ids(rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(2 * rank + micro_batch))


def bundled(stage: int, recomputed: bool) -> tuple[list[int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters of the layers, as DeepSpeed sees them; gradients, and weights after a step, by their own names."""
    from deepspeed.utils import safe_get_full_grad

    from lavis_ds import distributed
    from lavis_ds.config.schema import RunConfig
    from lavis_ds.engines.deepspeed import DeepSpeedEngine
    from lavis_ds.engines.ds_config import BatchPlan
    from lavis_ds.optim.groups import param_groups

    torch.set_num_threads(1)
    distributed.initialize(120)
    run = RunConfig.model_validate({**RUN, "deepspeed_config": {"zero_optimization": {**ZERO, "stage": stage}}})
    model = Model(recomputed=recomputed)
    engine = DeepSpeedEngine(model, param_groups(model, run), run, BatchPlan(4, 1, MICRO_BATCHES))
    layers = model.lm.model.layers
    members = [
        m.parameter for layer in layers for pair in layer.named_parameters() for m in engine.bundles.members(*pair)
    ]
    held: list[int] = []
    layers[2].register_forward_pre_hook(lambda *_: held.append(members[0].numel()))
    for number in range(MICRO_BATCHES):
        with engine.micro_batch(is_last=number == MICRO_BATCHES - 1):
            loss = engine(ids(distributed.global_rank(), number))[0] / MICRO_BATCHES
            engine.backward(loss)
    is_sharded = stage == 3
    assert (held[0] == 0) == is_sharded  # the first layer's weights are not kept for the backward pass
    assert any(member.numel() for member in members) != is_sharded
    named = [(name, p, safe_get_full_grad(p)) for name, p in engine.module.named_parameters() if p.requires_grad]
    gradients = {m.name: m.of(full).clone() for name, p, full in named for m in engine.bundles.members(name, p)}
    engine.step(1e-2)
    weights = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    return [len(list(layer.parameters())) for layer in layers], gradients, weights


@pytest.mark.parametrize(
    ("stage", "recomputed"),
    [
        (1, False), (2, True), (3, False), (3, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True), (2, False))),
    ],
)  # fmt: skip
def test_gradients_and_steps_are_those_of_separate_parameters(stage: int, recomputed: bool) -> None:
    """Measured: gradients below 3e-8, weights 4e-9."""
    model = Model()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.0)
    for rank in range(2):
        for number in range(MICRO_BATCHES):
            (model(ids(rank, number))[0] / MICRO_BATCHES / 2).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
    optimizer.step()
    for counts, gradients, weights in run_ranks(bundled, 2, stage, recomputed, timeout_s=120, join_group=False):
        assert counts == [2, 3, 2]  # matrices and vectors; and what is frozen
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        assert weights.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-5)
