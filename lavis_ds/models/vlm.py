"""A vision-language model of three parts: picture features become tokens among the text's.

Shape suffixes: B rows, T tokens a row, N images, Q tokens an image, D the language model's width.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.errors import ConfigError, DataError
from lavis_ds.models.base import is_frozen, parameter_dtype
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.next_token import NextTokenModel
from lavis_ds.models.parts import LanguageModel, NativeVisionEncoder, Projector, VisionEncoder
from lavis_ds.models.splice import splice
from lavis_ds.models.work import Work, attention_flops, num_layers, product_flops, reading


@registry.register_model("vlm")
class Vlm(NextTokenModel):
    """Vision encoder, projector and language model (LLaVA, https://arxiv.org/abs/2304.08485).

    To add a part, make it in `__init__` and override one of `encode_images`, `embed_batch`, `hidden_states`.
    """

    Config = VlmConfig

    def __init__(self, config: VlmConfig) -> None:
        super().__init__(config)
        vision: VisionEncoder | NativeVisionEncoder = registry.vision_encoders.get(config.vision.name)(config.vision)
        language: LanguageModel = registry.language_models.get(config.language.name)(config.language)
        projector: Projector = registry.projectors.get(config.projector.name)(
            config.projector, vision_hidden_size=vision.hidden_size, language_hidden_size=language.hidden_size
        )
        self.vision, self.projector, self.language = vision, projector, language  # the order of `parts()`
        self._tokens_per_image = _tokens_a_view(vision, projector)
        self.set_up_experts()

    @property
    def tokens_per_image(self) -> int | Fraction:
        return self._tokens_per_image

    @property
    def image_size(self) -> int | None:
        return self.vision.image_size if isinstance(self.vision, VisionEncoder) else None

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        return (self.vision.patch_elements,) if isinstance(self.vision, NativeVisionEncoder) else super().image_shape

    @property
    def merge_size(self) -> int | None:
        return self.projector.merge_size if isinstance(self.vision, NativeVisionEncoder) else None

    def work(self) -> Work:
        sees, maps = (not is_frozen(part) for part in (self.vision, self.projector))
        reads = sees or maps or not is_frozen(self.language)
        patches = self.vision.num_tokens
        a_pair = attention_flops(self.vision.hidden_size, num_layers(self.vision), gradient_passes=sees)
        a_view = product_flops(self.vision, gradient_passes=sees) * patches + a_pair * patches**2
        return Work(
            **reading(self.language, gradient_passes=reads),
            per_view=a_view + product_flops(self.projector, gradient_passes=sees) * float(self.tokens_per_image),
            in_flops=True,
        )

    def encode_images(self, images_N3HW: Tensor) -> Tensor:
        """Pixels -> tokens (N, Q, D)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen(self.vision)):
            features_NPDv = self.vision(images_N3HW)
        tokens_NQD: Tensor = self.projector(features_NPDv.to(parameter_dtype(self.projector)))
        return tokens_NQD

    def encode_patches(self, patches_PE: Tensor, grids_N3: Tensor) -> Tensor:
        """Patches of pictures of native resolution -> tokens (squares, 1, D).

        To the projector a square of patches is a whole picture, of which it makes one token.
        """
        size = self.projector.merge_size
        assert size is not None, "checked when the model was built"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen(self.vision)):
            features_PDv = self.vision(patches_PE, grids_N3, size)
        tokens_Q1D: Tensor = self.projector(
            features_PDv.view(-1, size**2, features_PDv.shape[-1]).to(parameter_dtype(self.projector))
        )
        return tokens_Q1D

    def embed_batch(self, batch: Batch) -> Tensor:
        """Embeddings of text and pictures (B, T, D). Calls the vision encoder exactly once."""
        if batch.images is None:
            raise DataError(
                "the batch has no pictures, not even the blank one that stands in for none.",
                where=f"samples {', '.join(batch.sample_ids)}",
                hint="Without it, ranks with and without pictures would wait for each other.",
            )
        if batch.image_grids is None:
            tokens_NQD = self.encode_images(batch.images)
        else:
            tokens_NQD = self.encode_patches(batch.images, batch.image_grids)
        return splice(self.language.embed(batch.input_ids), tokens_NQD, batch.image_index, batch.sample_ids)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states before the output layer (B, T, D)."""
        hidden_BTD: Tensor = self.language(self.embed_batch(batch), batch.position_ids, batch.segment_ids)
        return hidden_BTD

    @torch.no_grad()
    def generate(self, batch: Batch, **options: Any) -> Tensor:
        return self.language.generate(self.embed_batch(batch), batch.attention_mask, **options)


def _tokens_a_view(vision: VisionEncoder | NativeVisionEncoder, projector: Projector) -> int | Fraction:
    """Language tokens of a picture of fixed size; of a patch, at native resolution.

    Raises:
        ConfigError: the projector can't make tokens of so many patches, or needs the same number of every picture.
    """
    if isinstance(vision, VisionEncoder):
        return projector.num_tokens(vision.num_tokens)
    if projector.merge_size is None:
        raise ConfigError(
            "the projector needs pictures of a fixed number of patches, and the encoder takes them at their own size.",
            where="model.projector",
            given=type(projector).__name__,
            expected="linear, mlp, or average_pool with kernel_size",
        )
    return Fraction(1, projector.merge_size**2)
