"""The plain engine against a loop written by hand: clipping, AdamW, groups, precision, saving. One process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.engines.fragments import StoredFragments, write
from lavis_ds.engines.torch import TorchEngine
from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.optim.groups import param_groups


class Model(nn.Module):
    """`batch` is a pair of tensors; gives the sum of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.language = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.tensor(0.0), persistent=False)
        self.dtype_seen: torch.dtype | None = None

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden = self.vision(batch[0])
        self.dtype_seen = hidden.dtype
        error = self.language(hidden.relu()).float() - batch[1]
        return (error**2).sum(), torch.tensor(0.0)


def run(**options: Any) -> RunConfig:
    defaults = {"max_steps": 5, "batch_size_train": 3, "precision": "fp32", "init_lr": 1e-2, "weight_decay": 0.1}
    return RunConfig.model_validate({**defaults, **options})


def engine(model: nn.Module | None = None, **options: Any) -> TorchEngine:
    model, config = model or Model(), run(**options)
    return TorchEngine(model, param_groups(model, config), config, BatchPlan(3, 3, 1))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, 4, generator=generator), 5 * torch.randn(3, 1, generator=generator)


def train(built: TorchEngine, steps: range, micro_batches: int = 1) -> list[float]:
    norms = []
    for step in steps:
        parts = [tuple(t.chunk(micro_batches)[i] for t in data(step)) for i in range(micro_batches)]
        for index, part in enumerate(parts):
            with built.micro_batch(is_last=index == micro_batches - 1):
                built.backward(built(part)[0] / 3)  # type: ignore[arg-type]
        norms.append(built.step(1e-2 / (step + 1)).grad_norm)
    return norms


def by_hand(clip: float | None, steps: int) -> tuple[nn.Module, list[float]]:
    """Gradient, norm, clipping and AdamW (https://arxiv.org/abs/1711.05101) without any optimizer of PyTorch."""
    model, norms = Model().double(), []
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    for step in range(steps):
        model.zero_grad()
        inputs, targets = (t.double() for t in data(step))
        error = model.language(model.vision(inputs).relu()) - targets
        ((error**2).sum() / 3).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = float(sum((g**2).sum() for g in gradients.values()) ** 0.5)
        norms.append(norm)
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        lr = 1e-2 / (step + 1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                lr_of_part = lr * (0.5 if name.startswith("vision") else 1.0)
                g, (m, v) = gradients[name] * factor, moments[name]
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).add_(g * g, alpha=0.001)
                p.mul_(1 - lr_of_part * (0.1 if p.ndim > 1 else 0.0))
                p.sub_(lr_of_part * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
    return model, norms


@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
def test_equals_the_loop_by_hand(clip: float | None) -> None:
    built = engine(grad_clip=clip, param_groups={"vision": {"lr": 5e-3}})
    norms = train(built, range(5))
    expected, expected_norms = by_hand(clip, 5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)  # measured 1.3e-7: float32 against float64
    for (name, value), wanted in zip(built.module.named_parameters(), expected.parameters(), strict=True):
        # measured 6e-8
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_clipping_and_groups_matter_here() -> None:
    """Else the test above could not tell them from nothing."""
    norms = by_hand(None, 5)[1]
    assert min(norms) > 1.0
    clipped, free = by_hand(1.0, 5)[0], by_hand(None, 5)[0]
    difference = max((a - b).abs().max().item() for a, b in zip(clipped.parameters(), free.parameters(), strict=True))
    assert difference > 1e-4


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    whole, split = engine(), engine()
    # measured 1.2e-7 and 1e-9: sums in another order
    assert train(split, range(3), micro_batches=3) == pytest.approx(train(whole, range(3)), rel=1e-5)
    for a, b in zip(split.module.parameters(), whole.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_that_of_the_forward_pass_and_weights_stay_float32(precision: str, dtype: torch.dtype) -> None:
    model = Model()
    built = engine(model, precision=precision)
    train(built, range(1))
    assert model.dtype_seen == dtype
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss scaling.*fp16.*deepspeed"):
        engine(precision="fp16")


def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_alone() -> None:
    built = engine()
    train(built, range(1))
    weights, optimizer = copy.deepcopy(built.module.state_dict()), copy.deepcopy(built._optimizer.state_dict())
    built.backward(built(data(1))[0] * float("nan"))  # type: ignore[arg-type]
    result = built.step(1e-2)
    assert (result.applied, result.grad_norm) == (False, float("inf"))
    torch.testing.assert_close(dict(built.module.state_dict()), dict(weights), rtol=0, atol=0)
    assert built._optimizer.state_dict()["state"][0]["step"] == optimizer["state"][0]["step"]
    expected = engine()
    assert train(built, range(1, 2)) == train(expected, range(2))[1:]  # nothing of it is left in the gradients


def test_frozen_parameters_do_not_move() -> None:
    model = Model()
    model.vision.requires_grad_(False)
    before = model.vision.weight.clone()
    train(engine(model), range(2))
    assert torch.equal(model.vision.weight, before)


def test_saved_and_loaded_it_goes_on_exactly(tmp_path: Path) -> None:
    whole = engine()
    norms = train(whole, range(5))
    first = engine()
    train(first, range(2))
    write(first.fragments(), tmp_path, 0)
    second = engine()
    with torch.no_grad():
        for p in second.module.parameters():
            p.add_(1)
    weights = {name: tensor.detach().clone() for name, tensor in first.full_tensors()}
    assert second.restore(StoredFragments(tmp_path), weights, {}) == []
    assert train(second, range(2, 5)) == norms[2:]
    for a, b in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_did_not_train_before_starts_anew(tmp_path: Path) -> None:
    model = Model()
    model.vision.requires_grad_(False)
    first = engine(model)
    train(first, range(2))
    write(first.fragments(), tmp_path, 0)
    weights = {name: tensor.detach().clone() for name, tensor in first.full_tensors()}
    second = engine()
    assert second.restore(StoredFragments(tmp_path), weights, {}) == ["vision.weight", "vision.bias"]
    moments = [second._optimizer.state[p] for p in second.module.parameters()]
    assert [float(state["step"]) for state in moments] == [0, 0, 2, 2]
    assert [bool(state["exp_avg"].any()) for state in moments] == [False, False, True, True]


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    first = engine()
    train(first, range(2))
    write(first.fragments(), tmp_path, 0)
    weights = {name: tensor.detach().clone() for name, tensor in first.full_tensors()}
    with pytest.raises(CheckpointError, match=r"lacks a tensor.*vision\.bias"):
        engine().restore(
            StoredFragments(tmp_path), {name: w for name, w in weights.items() if name != "vision.bias"}, {}
        )
    with pytest.raises(CheckpointError, match=r"vision\.bias had another shape"):
        engine().restore(StoredFragments(tmp_path), {**weights, "vision.bias": torch.zeros(9)}, {})


def test_full_tensors_are_parameters_and_persistent_buffers() -> None:
    built = engine()
    tensors = dict(built.full_tensors())
    assert list(tensors) == ["vision.weight", "vision.bias", "language.weight", "language.bias", "scale"]
    assert tensors["vision.weight"] is built.module.vision.weight  # type: ignore[union-attr]


def test_description() -> None:
    assert engine(precision="bf16").describe() == {"engine": "torch", "data_parallel_size": 1, "precision": "bf16"}
