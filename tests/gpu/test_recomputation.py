"""On one GPU: what recomputation, offloading and tiles save, with the kernels of training, compiled and not."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lavis_ds.batch import SEGMENT_STRIDE
from lavis_ds.models.attention import choose
from lavis_ds.models.configs import LayersConfig
from lavis_ds.models.language.tiled_mlp import tile_mlps
from lavis_ds.models.layers import compile_layers, repeated_layers
from lavis_ds.models.moe.grouped import NAME
from lavis_ds.models.recomputation import recompute

pytestmark = pytest.mark.gpu

LENGTH, WIDTH, LAYERS = 16_384, 1024, 6
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64, "pad_token_id": None, "initializer_range": 0.03,
}  # fmt: skip
MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}


class Found(NamedTuple):
    tensors: list[Tensor]
    bytes: int


def measure(way: str, *, offload: bool, tiles: int | None, compiled: bool, family: str) -> Found:
    """Hidden states and gradients; peak bytes of the second step beyond what was there before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kernel = choose("auto", "model.language.attention")
    shape = SHAPE | (MOE if family == "qwen3_moe" else {})
    config = AutoConfig.for_model(family, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel.build_with)  # type: ignore[no-untyped-call]
    model = model.cuda().bfloat16()
    if family == "qwen3_moe":
        model.set_experts_implementation(NAME)
    kernel = kernel.fitted(model)
    tile_mlps(repeated_layers(model), tiles, "model.language")
    options = LayersConfig(gradient_checkpointing=way, offload_activations=offload)
    recompute(repeated_layers(model), options, "model.language")
    if compiled:
        assert compile_layers(model) == LAYERS
    segments = (torch.arange(LENGTH, device="cuda") // 1000 * SEGMENT_STRIDE)[None]
    places = (torch.arange(LENGTH, device="cuda") % 1000)[None]
    embeds = torch.randn(1, LENGTH, WIDTH, device="cuda").bfloat16().requires_grad_()
    given = kernel.options(embeds, segments)

    def step() -> Tensor:
        hidden: Tensor = model.model(inputs_embeds=embeds, position_ids=places, use_cache=False, **given)[0]
        hidden.float().sin().mean().backward()
        return hidden.detach()

    step()
    for tensor in (embeds, *model.parameters()):
        tensor.grad = None if tensor.grad is None else tensor.grad.zero_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = step()
    peak = torch.cuda.max_memory_allocated() - before
    assert embeds.grad is not None
    gradients = [embeds.grad, *(p.grad for p in model.model.parameters() if p.grad is not None)]
    return Found([tensor.float().cpu() for tensor in (hidden, *gradients)], peak)


@functools.cache
def found(
    way: str, offload: bool = False, tiles: int | None = None, compiled: bool = False, family: str = "qwen3"
) -> Found:
    return measure(way, offload=offload, tiles=tiles, compiled=compiled, family=family)


def error(ours: Found, reference: Found) -> float:
    assert len(ours.tensors) == len(reference.tensors)
    pairs = zip(ours.tensors, reference.tensors, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("way", "offload", "tiles"),
    [("full", False, None), ("every_2", False, None), ("selective", False, None), ("full", True, None),
     ("every_2", True, None), ("none", False, 4), ("full", True, 4)],
)  # fmt: skip
def test_gradients_are_the_same(way: str, offload: bool, tiles: int | None, compiled: bool) -> None:
    """In bf16, whose rounding differs where compiled graphs are cut differently."""
    assert error(found(way, offload, tiles, compiled), found("none", compiled=compiled)) < 0.03


@pytest.mark.parametrize("way", ["full", "selective"])
def test_experts_too(way: str) -> None:
    assert error(found(way, family="qwen3_moe"), found("none", family="qwen3_moe")) < 0.03


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_memory(compiled: bool, record_property: Any) -> None:
    """The more is recomputed, the less is kept; offloading saves what layers start from."""
    ways = {
        "none": found("none", compiled=compiled), "every_2": found("every_2", compiled=compiled),
        "selective": found("selective", compiled=compiled), "full": found("full", compiled=compiled),
        "offloaded": found("full", True, compiled=compiled), "tiled": found("full", True, 4, compiled=compiled),
    }  # fmt: skip
    size = {name: one.bytes / 2**20 for name, one in ways.items()}
    print(f"\nMiB, {'compiled' if compiled else 'eager'}:", {name: round(mib) for name, mib in size.items()})
    assert size["full"] < 0.7 * size["every_2"]
    assert size["every_2"] < 0.8 * size["none"]
    assert size["selective"] < 0.9 * size["none"]
    a_layer = LENGTH * WIDTH * 2 / 2**20
    assert size["offloaded"] < size["full"] - (LAYERS - 3) * a_layer
    assert size["tiled"] < 0.8 * size["offloaded"]
