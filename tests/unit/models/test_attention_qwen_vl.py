"""Qwen-VL's tower and decoder through the kernel of variable length, whose place SDPA takes here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from lavis_ds.batch import SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models import attention
from lavis_ds.models.attention import Attention
from lavis_ds.models.vision.qwen_vl_tower import QwenVLTower

SHAPE: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
    "initializer_range": 0.2,
}  # fmt: skip
TOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_5_vl": (
        Qwen2_5_VisionTransformerPretrainedModel,
        {**SHAPE, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        Qwen3VLVisionModel,
        {**SHAPE, "patch_size": 16, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    ),
}
VARLEN = Attention("varlen", "model.vision.attention", explicit=False)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(attention, "cannot_run", lambda _: None)


def tower(name: str, kernel: Attention, **change: Any) -> QwenVLTower:
    torch.manual_seed(0)
    made, shape = TOWERS[name]
    config = AutoConfig.for_model(f"{name}_vision", **shape | change)
    return QwenVLTower(made._from_config(config), (0.5,) * 3, (0.5,) * 3, kernel)


def run(part: QwenVLTower) -> list[Tensor]:
    """Outputs and gradients for two pictures and a video of two steps."""
    grids = torch.tensor([[1, 4, 6], [2, 6, 2], [1, 8, 10]])
    patches = torch.randint(0, 255, (int(grids.prod(-1).sum()), part.patch_elements), dtype=torch.uint8)
    tokens, features = part(patches, grids)
    torch.stack([tokens, *features]).sin().sum().backward()
    gradients = [p.grad for p in part.parameters() if p.grad is not None]
    return [tokens.detach(), *(feature.detach() for feature in features), *gradients]


@pytest.mark.parametrize("name", TOWERS)
def test_tower_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tower(name, Attention("sdpa", "", explicit=True)))
    ours = tower(name, VARLEN)
    assert ours.attention == "varlen"
    monkeypatch.setattr(torch.Tensor, "split", None)  # transformers would take pictures apart in every layer
    for value, reference in zip(run(ours), expected, strict=True):
        assert (value - reference).norm() < 1e-5 * reference.norm().clamp(min=1e-3)  # measured 6e-7


def test_heads_of_odd_size_are_left_to_sdpa() -> None:
    odd = {"hidden_size": 48, "num_heads": 4, "out_hidden_size": 32}
    part = tower("qwen3_vl", VARLEN, **odd)
    assert part.attention == "sdpa (its heads have size 12)"
    run(part)
    with pytest.raises(ConfigError, match="heads have size 12"):
        tower("qwen3_vl", Attention("varlen", "model.vision.attention", explicit=True), **odd)


def test_named_kernel_refuses_what_it_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "cannot_run", lambda _: "tensors are float32")
    with pytest.raises(ConfigError, match=r"model\.vision\.attention: varlen can't run here: tensors are float32"):
        run(tower("qwen3_vl", Attention("varlen", "model.vision.attention", explicit=True)))
    expected = run(tower("qwen3_vl", Attention("sdpa", "", explicit=True)))
    with pytest.warns(UserWarning, match="sdpa runs instead"):
        ours = run(tower("qwen3_vl", VARLEN))
    torch.testing.assert_close(ours[0], expected[0], atol=1e-5, rtol=1e-5)  # measured 1e-6


def test_decoder_is_the_same() -> None:
    """Positions have three axes, and DeepStack's features reach the first layers."""
    results = []
    segments = torch.tensor([[0] * 9 + [1] * 4 + [2] * 5 + [SEGMENT_STRIDE] * 12])
    positions = torch.tensor([[*range(13), *range(9, 14), *range(12)]]).expand(3, 1, -1)
    marked = torch.zeros(1, 30, dtype=torch.bool)
    marked[0, [2, 3, 20]] = True
    for kernel in ("eager", "varlen"):
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
        config = AutoConfig.for_model(
            "qwen3_vl_text", hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=64, initializer_range=0.2, rope_parameters=rope,
        )  # fmt: skip
        model = Qwen3VLTextModel._from_config(config, attn_implementation="eager")
        fitted = Attention(kernel, "model.language.attention", explicit=True).fitted(model)
        embeds = torch.randn(1, 30, 32, requires_grad=True)
        features = list(torch.randn(2, 3, 32))
        stack = {"visual_pos_masks": marked, "deepstack_visual_embeds": features}
        options = fitted.options(embeds, segments)
        hidden = model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **options, **stack)[0]
        hidden.sin().sum().backward()
        results.append([hidden.detach(), embeds.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()  # measured 9e-7
