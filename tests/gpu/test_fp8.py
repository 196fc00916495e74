"""On one GPU with torchao: products in 8 bits run, compiled and not, are as exact as expected, and learn alike."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from lavis_ds.models.configs import LayersConfig
from lavis_ds.models.fp8 import use_fp8
from lavis_ds.models.layers import compile_layers, repeated_layers
from lavis_ds.models.parts import Part
from lavis_ds.models.recomputation import recompute

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao")

RECIPES = ["tensorwise", "rowwise"]
SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512, "pad_token_id": None,
}  # fmt: skip


class Decoder(Part):
    def __init__(self, recipe: Any = None, *, way: str = "none", compiled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE))  # type: ignore[no-untyped-call]
        recompute(repeated_layers(self.lm), LayersConfig(gradient_checkpointing=way), "model.language")
        if recipe:
            said = use_fp8(self, recipe, "model.language.fp8")
            assert said == f"{recipe} in 14 linear layers"
        self.cuda().bfloat16()
        if compiled:
            compile_layers(self)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.lm(ids, labels=ids, use_cache=False).loss
        return loss

    def output_layers(self) -> tuple[nn.Module, ...]:
        return (self.lm.lm_head,)


def text(rows: int, length: int, seed: int) -> Tensor:
    """Each row counts up in steps of its own: to be learned from the two tokens before."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(1, most, (rows, 1), generator=generator) for most in (512, 40))
    return ((start + step * torch.arange(length)) % 512).cuda()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def products_in_8_bits(function: Callable[[], object]) -> int:
    """How many the device runs. A dispatch mode would not see them, since they are inside a subclass of tensors."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::_scaled_mm"))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients(recipe: str, rows: int) -> None:
    """333 tokens a row, which are no multiple of 16. Three products a layer: output, and both gradients."""
    ids = text(rows, 333, 1)
    models = [Decoder(compiled=False), Decoder(recipe, compiled=False)]
    models[0](ids).backward()
    assert products_in_8_bits(lambda: models[1](ids).backward()) == 3 * 14
    for (name, ours), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert ours.grad is not None
        assert other.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        assert error(ours.grad, other.grad) < 0.35, name  # at random initialisation; measured 0.29 on a CPU


@pytest.mark.parametrize("way", ["none", "full", "selective"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_is_as_exact_as_eager(recipe: str, way: str) -> None:
    """Each rounds in its own way, so that the two differ about as much as each does from products in 16 bits.

    Measured on a CPU with rows of 96, over 16 bits: 0.208 on average and compiled 0.205 with a scale for each tensor,
    0.193 and 0.189 with one for each row; no more than 0.32. Over each other, no more than 0.25.
    """
    found = []
    for chosen, compiled in ((None, False), (recipe, False), (recipe, True)):
        model = Decoder(chosen, way=way, compiled=compiled)
        for length in (512, 500):  # another length must not need another graph, nor fail
            model.zero_grad()
            loss = model(text(2, length, 1))
            loss.backward()
        found.append((float(loss.detach()), [p.grad.float() for p in model.parameters() if p.grad is not None]))
    (exact, exact_gradients), *in_8_bits = found
    errors = []
    for loss_in_8_bits, gradients in in_8_bits:
        assert loss_in_8_bits == pytest.approx(exact, abs=0.02)
        errors.append([error(a, b) for a, b in zip(gradients, exact_gradients, strict=True)])
    means = [fmean(each) for each in errors]
    print(f"eager {means[0]:.3f} ({max(errors[0]):.3f} at most), compiled {means[1]:.3f} ({max(errors[1]):.3f})")
    assert max(*errors[0], *errors[1]) < 0.35
    assert means[1] < 1.1 * means[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_bf16_does(recipe: str, record_property: Any) -> None:
    """200 steps of a task that starts at ln 512 = 6.2: the curves stay together, and end as low."""
    curves = []
    for chosen in (None, recipe):
        model = Decoder(chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        losses = []
        for number in range(200):
            loss = model(text(16, 64, number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).float().cpu())
        torch._dynamo.reset()
    tails = [float(curve[-20:].mean()) for curve in curves]
    print(f"\n{recipe}: bf16 {tails[0]:.4f}, fp8 {tails[1]:.4f}")
    assert tails[0] < 2.5
    assert tails[1] == pytest.approx(tails[0], rel=0.1, abs=0.02)
    assert list(model.state_dict()) == list(Decoder(compiled=False).state_dict())
