"""Operations by formula are those that PyTorch counts, forward and backward, whatever trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import timm.layers
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lavis_ds import registry
from lavis_ds.batch import IGNORE_INDEX, Batch, DatasetCounts
from lavis_ds.config.decode import decode
from lavis_ds.models.base import Model
from lavis_ds.models.work import Amount, Work, matrix_elements

LENGTH, TARGETS, GRID = 88, 40, (1, 8, 12)
TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 8]}}
VISION = {
    "depth": 3, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4, "out_hidden_size": 128,
    "deepstack_visual_indexes": [1], "num_position_embeddings": 256, "patch_size": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}
EAGER = {"attention": "eager"}


@pytest.fixture(autouse=True)
def counted_attention() -> Iterator[None]:
    """PyTorch counts no FLOPs of its fused attention on a CPU."""
    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(True)


def build(arch: str, **options: Any) -> Model:
    torch.manual_seed(0)
    config = decode(registry.models.config_class(arch), {"arch": arch, **options})
    built: Model = registry.models.get(arch).from_config(config)
    return built


def qwen(tokenizer: str, arch: str = "qwen3_vl", text: dict[str, Any] | None = None, **options: Any) -> Model:
    shape = {"text_config": {**TEXT, **ROPE, **(text or {})}, "vision_config": VISION}
    language = {"tokenizer": tokenizer, **EAGER, **options.pop("language", {})}
    return build(arch, config=shape, language=language, vision=EAGER, **options)


def llava(tokenizer: str, **options: Any) -> Model:
    vit = {"patch_size": 8, "embed_dim": 96, "depth": 3, "num_heads": 4}
    language = {"name": "hf_causal_lm", "config": {"model_type": "qwen3", **TEXT}, "tokenizer": tokenizer, **EAGER}
    vision = {"name": "timm_vit", "model_name": "vit_base_patch16_224", "image_size": 64, "model_args": vit}
    return build("vlm", vision=vision, projector={"name": "mlp"}, language=language, **options)


def batch_of(model: Model) -> Batch:
    """A row with one picture; the last tokens are targets."""
    native = model.merge_size is not None
    images = torch.zeros((GRID[1] * GRID[2], *model.image_shape) if native else (1, *model.image_shape)).byte()  # type: ignore[misc]
    num_image_tokens = int(len(images) * model.tokens_per_image)
    labels = torch.full((1, LENGTH), IGNORE_INDEX)
    labels[:, -TARGETS:] = 5
    positions = torch.arange(LENGTH).view(1, -1)
    return Batch(
        input_ids=torch.full((1, LENGTH), 6),
        labels=labels,
        position_ids=positions.expand(3, 1, -1) if model.has_mrope else positions,
        attention_mask=torch.ones(1, LENGTH, dtype=torch.bool),
        images=images,
        image_grids=torch.tensor([GRID]) if native else None,
        image_index=torch.arange(num_image_tokens) + 3,
        target_index=torch.arange(LENGTH - TARGETS - 1, LENGTH - 1),
        num_targets=TARGETS,
        target_weight=float(TARGETS),
        num_tokens=LENGTH,
        sample_ids=("a",),
        positions=(0,),
        by_dataset=(DatasetCounts("data", 1, LENGTH, float(TARGETS)),),
    )


def error(model: Model) -> float:
    """Of the formula, relative to what PyTorch counts. Its plain attention makes all pairs, also those of no use."""
    batch = batch_of(model)
    assert batch.images is not None
    with FlopCounterMode(display=False) as counter:
        model(batch)[0].backward()
    views = len(batch.images)
    amount = Amount(LENGTH, LENGTH**2, TARGETS, views, views**2)
    counted = float(counter.get_total_flops())
    return model.work().total(amount) / counted - 1


@pytest.mark.parametrize("freeze", [[], ["vision"], ["language"]], ids=str)
def test_qwen_vl(freeze: list[str], tokenizer_dir: str) -> None:
    """Measured 0."""
    assert abs(error(qwen(tokenizer_dir, freeze=freeze))) < 1e-9


@pytest.mark.parametrize("freeze", [[], ["vision"], ["vision", "language"]], ids=str)
def test_vision_projector_and_language_model(freeze: list[str], tokenizer_dir: str) -> None:
    """Measured -0.7 %, of the class token."""
    assert abs(error(llava(tokenizer_dir, freeze=freeze))) < 0.02


def test_adapters(tokenizer_dir: str) -> None:
    """Measured 1.2 %: nothing trains before the first layer, whose inputs need no gradient."""
    model = qwen(tokenizer_dir, text={"num_hidden_layers": 6}, freeze=["vision"], language={"lora": {"r": 8}})
    assert abs(error(model)) < 0.02


def test_of_experts_those_that_are_visited(tokenizer_dir: str) -> None:
    model = qwen(tokenizer_dir, "qwen3_vl_moe", EXPERTS, language={"experts": "eager"})
    assert abs(error(model)) < 1e-9


def test_a_sample_is_the_sum_of_what_it_is_made_of() -> None:
    work = Work(per_token=2, per_pair=3, per_target=5, per_view=7, per_view_pair=11)
    assert work.of(4, 2) == 2 * 4 + 3 * 8 + 5 * 4 + 7 * 2
    assert work.total(Amount(1, 10, 100, 1000, 10_000)) == 2 + 30 + 500 + 7000 + 110_000
    assert Work().of(4, 2) == 4


def test_weights_in_four_bits_count_as_what_they_stand_for() -> None:
    layer = nn.Linear(6, 4)
    layer.weight = type("Params4bit", (nn.Parameter,), {})(torch.zeros(12, 1), requires_grad=False)
    assert matrix_elements(layer) == 24
    assert matrix_elements(layer, training=True) == 0
