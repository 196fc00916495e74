"""A vision-language model of three parts: picture features become tokens among the text's.

Shape suffixes: B rows, T tokens a row, N images, Q tokens an image, D the language model's width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.errors import DataError
from lavis_ds.models.base import Work, is_frozen, matrix_elements
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.next_token import NextTokenModel
from lavis_ds.models.parts import LanguageModel, Projector, VisionEncoder
from lavis_ds.models.splice import splice


@registry.register_model("vlm")
class Vlm(NextTokenModel):
    """Vision encoder, projector and language model (LLaVA, https://arxiv.org/abs/2304.08485).

    To add a part, make it in `__init__` and override one of `encode_images`, `embed_batch`, `hidden_states`.
    """

    Config = VlmConfig

    def __init__(self, config: VlmConfig) -> None:
        super().__init__(config)
        vision: VisionEncoder = registry.vision_encoders.get(config.vision.name)(config.vision)
        language: LanguageModel = registry.language_models.get(config.language.name)(config.language)
        projector: Projector = registry.projectors.get(config.projector.name)(
            config.projector, vision_hidden_size=vision.hidden_size, language_hidden_size=language.hidden_size
        )
        self.vision, self.projector, self.language = vision, projector, language  # the order of `parts()`
        self._tokens_per_image = projector.num_tokens(vision.num_tokens)
        self.set_up_experts()

    @property
    def tokens_per_image(self) -> int:
        return self._tokens_per_image

    @property
    def image_size(self) -> int:
        return self.vision.image_size

    def work(self) -> Work:
        """FLOPs of matrix products: 2 a weight forward, 2 for the input's gradient, 2 for the weight's."""
        passes = [1 if is_frozen(self.vision) else 3, 3, 2 if is_frozen(self.language) else 3]
        vision, projector, language = (
            2 * count * matrix_elements(part) for count, part in zip(passes, self.parts().values(), strict=False)
        )
        pairs = 4 * passes[2] * self.language.hidden_size * self.language.num_layers  # scores and weighted values
        return Work(
            per_token=language,
            per_pair=pairs,
            per_view=vision * self.vision.num_tokens + projector * self.tokens_per_image,
        )

    def encode_images(self, images_N3HW: Tensor) -> Tensor:
        """Pixels -> tokens (N, Q, D)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen(self.vision)):
            features_NPDv = self.vision(images_N3HW)
        tokens_NQD: Tensor = self.projector(features_NPDv)
        return tokens_NQD

    def embed_batch(self, batch: Batch) -> Tensor:
        """Embeddings of text and pictures (B, T, D). Calls the vision encoder exactly once."""
        if batch.images is None:
            raise DataError(
                "the batch has no pictures, not even the blank one that stands in for none.",
                where=f"samples {', '.join(batch.sample_ids)}",
                hint="Without it, ranks with and without pictures would wait for each other.",
            )
        tokens_NQD = self.encode_images(batch.images)
        return splice(self.language.embed(batch.input_ids), tokens_NQD, batch.image_index, batch.sample_ids)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states before the output layer (B, T, D)."""
        hidden_BTD: Tensor = self.language(self.embed_batch(batch), batch.position_ids, batch.segment_ids)
        return hidden_BTD

    @torch.no_grad()
    def generate(self, batch: Batch, **options: Any) -> Tensor:
        return self.language.generate(self.embed_batch(batch), batch.attention_mask, **options)
