"""Qwen2.5-VL and Qwen3-VL: the classes of transformers as parts of a model like any other here.

Shape suffixes: B rows, T tokens a row, P patches, N pictures, Q tokens of all pictures, D the language model's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.errors import ConfigError, DataError
from lavis_ds.models import attention, hub
from lavis_ds.models.base import is_frozen
from lavis_ds.models.configs import Qwen2_5VLConfig, Qwen3VLConfig, Qwen3VLMoEConfig, QwenVLConfig
from lavis_ds.models.language.qwen_vl_decoder import DeepStack, QwenVLDecoder
from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.next_token import NextTokenModel
from lavis_ds.models.recomputation import recompute
from lavis_ds.models.splice import splice
from lavis_ds.models.vision.qwen_vl_tower import QwenVLTower
from lavis_ds.models.work import Work, attention_flops, product_flops, reading

_WHERE = "model.config"
_MARKS = [
    ("image", "image_pad"),
    ("video", "video_pad"),
    ("vision_start", "vision_start"),
    ("vision_end", "vision_end"),
]
"""Ids that a configuration names, and their tokens."""


class QwenVL(NextTokenModel):
    """Vision tower with merger, and language model; pictures of native resolution.

    Attributes:
        model_type: of the family, in transformers.
        mean: of each channel in pretraining, for pixels in 0..1.
        std: of each channel.

    Raises:
        ConfigError: it is another family's, the shape is impossible, or the tokenizer does not fit.
        CheckpointError: the folder or hub id holds no model, or its weights are not complete.
    """

    Config = QwenVLConfig
    model_type: ClassVar[str]
    mean: ClassVar[Sequence[float]]
    std: ClassVar[Sequence[float]]

    language: QwenVLDecoder

    def __init__(self, config: QwenVLConfig) -> None:
        super().__init__(config)
        tokenizer = hub.load_tokenizer(config.language.tokenizer or str(config.path), "model.language.tokenizer")
        seeing = attention.choose(config.vision.attention, "model.vision.attention")
        reading = attention.choose(config.language.attention, "model.language.attention")
        kernels = {"vision_config": seeing.build_with, "text_config": reading.build_with}
        whole = _build(config, self.model_type, tokenizer, kernels)
        self.vision = QwenVLTower(whole.model.visual, self.mean, self.std, seeing)
        self.language = QwenVLDecoder(whole, config.language, tokenizer, reading)
        if config.path is not None:
            self.vision.sourced, self.language.sourced = ("tower",), ("decoder", "lm_head")
        recompute(repeated_layers(self.vision.tower), config.vision, "model.vision")
        self.set_up_experts()

    @property
    def tokens_per_image(self) -> Fraction:
        return Fraction(1, self.vision.merge_size**2)

    @property
    def image_size(self) -> None:
        return None

    @property
    def image_shape(self) -> tuple[int, ...]:
        return (self.vision.patch_elements,)

    @property
    def merge_size(self) -> int:
        return self.vision.merge_size

    @property
    def has_mrope(self) -> bool:
        return True

    @property
    def image_marks(self) -> tuple[str, str]:
        return "<|vision_start|>", "<|vision_end|>"

    @property
    def placeholders(self) -> tuple[str, str]:
        return "<|image_pad|>", "<|video_pad|>"

    @property
    def tokens_per_second(self) -> float | None:
        return self.vision.tokens_per_second

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "vision attention": self.vision.attention}

    def work(self) -> Work:
        """As in `Vlm`; a view is a patch."""
        sees = not is_frozen(self.vision)
        tower, config = self.vision.tower, self.vision.tower.config
        mergers = [part for name, part in tower.named_children() if "merger" in name]
        all_products, merging = (
            sum(product_flops(part, gradient_passes=sees) for part in parts) for parts in ([tower], mergers)
        )
        whole = len(getattr(config, "fullatt_block_indexes", range(config.depth)))  # the others see windows
        per_pair = attention_flops(config.hidden_size, 1, gradient_passes=sees)
        in_window = (getattr(config, "window_size", 0) // config.patch_size) ** 2
        return Work(
            **reading(self.language, gradient_passes=sees or not is_frozen(self.language)),
            per_view=all_products
            - merging
            + merging / self.vision.merge_size**2
            + per_pair * (config.depth - whole) * in_window,
            per_view_pair=per_pair * whole,
            in_flops=True,
        )

    def embed_batch(self, batch: Batch) -> tuple[Tensor, DeepStack | None]:
        """Embeddings of text and pictures (B, T, D), and what the first layers add. Calls the tower exactly once."""
        if batch.images is None or batch.image_grids is None:
            raise DataError(
                "the batch has no patches with their grids, not even the blank picture that stands in for none.",
                where=f"samples {', '.join(batch.sample_ids)}",
                hint="Without it, ranks with and without pictures would wait for each other.",
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen(self.vision)):
            tokens_QD, features = self.vision(batch.images, batch.image_grids)
        embeds_BTD = self.language.embed(batch.input_ids)
        spliced_BTD = splice(embeds_BTD, tokens_QD[None], batch.image_index, batch.sample_ids)
        return spliced_BTD, DeepStack.at(batch.image_index, features)

    def hidden_states(self, batch: Batch) -> Tensor:
        embeds_BTD, deepstack = self.embed_batch(batch)
        hidden_BTD: Tensor = self.language(embeds_BTD, batch.position_ids, batch.segment_ids, deepstack)
        return hidden_BTD

    @torch.no_grad()
    def generate(self, batch: Batch, **options: Any) -> Tensor:
        embeds_BTD, deepstack = self.embed_batch(batch)
        return self.language.continue_prompts(
            embeds_BTD, batch.attention_mask, batch.position_ids, deepstack, **options
        )


@registry.register_model("qwen2_5_vl")
class Qwen2_5VL(QwenVL):
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923); the types are in `configs/models/qwen2_5_vl/`."""

    Config = Qwen2_5VLConfig
    model_type = "qwen2_5_vl"
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)


@registry.register_model("qwen3_vl")
class Qwen3VL(QwenVL):
    """Qwen3-VL (https://arxiv.org/abs/2511.21631); the types are in `configs/models/qwen3_vl/`."""

    Config = Qwen3VLConfig
    model_type = "qwen3_vl"
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)


@registry.register_model("qwen3_vl_moe")
class Qwen3VLMoE(Qwen3VL):
    """Qwen3-VL with experts; the types are in `configs/models/qwen3_vl_moe/`."""

    Config = Qwen3VLMoEConfig
    model_type = "qwen3_vl_moe"


def _build(config: QwenVLConfig, model_type: str, tokenizer: Any, kernels: dict[str, str]) -> Any:
    """The whole Hugging Face model, with its weights or random ones."""
    try:
        if config.path is not None:
            shape = hub.read_config(config.path, "model.path")
            _check_family(shape, model_type, "model.path")
            return hub.load_model(
                AutoModelForImageTextToText, config.path, "model.path", config=shape, attn_implementation=kernels
            )
        shape = _shape(config.config or {}, model_type, tokenizer)
        return hub.make_model(AutoModelForImageTextToText, shape, attn_implementation=kernels)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"this model can't be built: {' '.join(str(error).split())[:300]}.", where="model") from error


def _check_family(shape: Any, model_type: str, where: str) -> None:
    if shape.model_type != model_type:
        raise ConfigError(
            f"this is a {shape.model_type}.",
            where=where,
            expected=f"a {model_type}",
            hint=f"Is there a model.arch {shape.model_type}? `lavis-ds list models` tells.",
        )


def _shape(options: dict[str, Any], model_type: str, tokenizer: Any) -> Any:
    """The configuration that `options` describe, with the tokenizer's ids.

    Raises:
        ConfigError: a key or value is wrong, or the two parts do not fit each other.
    """
    text = hub.config_of_shape(
        {"model_type": f"{model_type}_text", **options.get("text_config", {})},
        f"{_WHERE}.text_config",
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    vision = hub.config_of_shape(
        {"model_type": f"{model_type}_vision", **options.get("vision_config", {})}, f"{_WHERE}.vision_config"
    )
    vocabulary = tokenizer.get_vocab()
    ids = {f"{name}_token_id": vocabulary[f"<|{mark}|>"] for name, mark in _MARKS if f"<|{mark}|>" in vocabulary}
    rest = {"model_type": model_type, **options, "text_config": text, "vision_config": vision}
    shape = hub.config_of_shape(rest, _WHERE, **ids)
    _check_family(shape, model_type, f"{_WHERE}.model_type")
    _check_fit(text, vision)
    return shape


def _check_fit(text: Any, vision: Any) -> None:
    if vision.out_hidden_size != text.hidden_size:
        raise ConfigError(
            "the vision tower's tokens are not as wide as the language model.",
            where=f"{_WHERE}.vision_config.out_hidden_size",
            given=vision.out_hidden_size,
            expected=text.hidden_size,
        )
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sections = text.rope_parameters.get("mrope_section", [])
    if 2 * sum(sections) != head_size:
        raise ConfigError(
            "the rotary frequencies of time, height and width are not half a head in all.",
            where=f"{_WHERE}.text_config.rope_parameters.mrope_section",
            given=sections,
            expected=f"three numbers that add up to {head_size // 2}",
        )
