"""Qwen-VL's tower and decoder through the kernel of variable length, whose place SDPA takes here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from lavis_ds.batch import SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models import attention, attention_kernels
from lavis_ds.models.attention import Attention
from lavis_ds.models.vision import qwen_vl_tower
from lavis_ds.models.vision.qwen_vl_tower import PatchProjection, QwenVLTower

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
    monkeypatch.setattr(attention, "cannot_run", lambda _: None)


def tower(name: str, kernel: Attention, **change: Any) -> QwenVLTower:
    torch.manual_seed(0)
    made, shape = TOWERS[name]
    config = AutoConfig.for_model(f"{name}_vision", **shape | change)
    return QwenVLTower(made._from_config(config), (0.5,) * 3, (0.5,) * 3, kernel)


GRIDS = torch.tensor([[1, 4, 6], [2, 6, 2], [1, 8, 10]])
"""Two pictures and a video of two steps."""


def run(part: QwenVLTower, grids: Tensor = GRIDS) -> list[Tensor]:
    """Outputs and gradients."""
    rng = torch.Generator().manual_seed(0)
    shape = (int(grids.prod(-1).sum()), part.patch_elements)
    patches = torch.randint(0, 255, shape, dtype=torch.uint8, generator=rng)
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


def test_pictures_of_one_size_are_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on, for so many pairs of size and number; never with windows, or where a kernel is named."""

    def plans(part: QwenVLTower, *grids: list[int]) -> bool:
        grids_N3 = torch.tensor(grids)
        patches = torch.zeros(int(grids_N3.prod(-1).sum()), part.patch_elements, dtype=torch.uint8)
        return "rows_of_one_length" in part._layout(grids_N3, part.pixels(patches))

    monkeypatch.setattr(qwen_vl_tower, "can_run_one_length", lambda *_: True)
    monkeypatch.setattr(qwen_vl_tower, "_MAX_PLANS", 2)
    part = tower("qwen3_vl", VARLEN)
    assert [plans(part, [1, 4, 6], [1, 4, 6]) for _ in range(3)] == [False, True, True]
    assert plans(part, [3, 6, 4])  # steps of a video, as many rows with the empty ones
    assert not plans(part, [1, 4, 6], [1, 4, 8])
    assert [plans(part, *[[1, 4, 6]] * 4) for _ in range(2)] == [False, True]
    assert [plans(part, [1, 4, 8]) for _ in range(3)] == [False] * 3  # a third pair
    for other in (tower("qwen3_vl", Attention("varlen", "", explicit=True)), tower("qwen2_5_vl", VARLEN)):
        assert [plans(other, [1, 4, 6]) for _ in range(2)] == [False] * 2


def test_rows_of_any_number_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 5e-7."""

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: None, with_sums: bool, *, scale: float) -> tuple[Tensor]:
        assert len(q) % 4 == 0
        return (scaled_dot_product_attention(q, k, v, scale=scale),)

    monkeypatch.setattr(attention_kernels, "_cudnn_of_torch", dense)
    monkeypatch.setattr(qwen_vl_tower, "can_run_one_length", lambda *_: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, reference = tower("qwen3_vl", VARLEN), tower("qwen3_vl", Attention("sdpa", "", explicit=True))
    ours._plans.update({(24, 4): 1, (24, 8): 1, (80, 4): 1})
    for block in ours.tower.blocks:
        block.compile(dynamic=True, fullgraph=True, backend="aot_eager")
    for sizes in ([[1, 4, 6]] * 3, [[1, 4, 6]] * 5, [[1, 6, 4]] * 4, [[1, 8, 10]] * 2):
        for part in (ours, reference):
            part.zero_grad()
        found, expected = (run(part, torch.tensor(sizes)) for part in (ours, reference))
        for value, other in zip(found, expected, strict=True):
            assert (value - other).norm() < 1e-5 * other.norm().clamp(min=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first block's input may be a view


@pytest.mark.parametrize("name", TOWERS)
def test_patches_are_projected_as_by_the_convolution(name: str) -> None:
    """Measured: 3e-7."""
    part = tower(name, VARLEN)
    projection = part.tower.patch_embed.proj
    plain = nn.Conv3d(3, projection.out_channels, projection.kernel_size, projection.stride, bias=name == "qwen3_vl")
    plain.load_state_dict(projection.state_dict())
    patches = torch.randn(5, 3, *projection.kernel_size)
    assert type(projection) is PatchProjection
    torch.testing.assert_close(projection(patches), plain(patches), atol=1e-5, rtol=1e-5)
    video = torch.randn(1, 3, *(2 * size for size in projection.kernel_size))
    torch.testing.assert_close(projection(video), plain(video))


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
