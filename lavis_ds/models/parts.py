"""The three parts of a vision-language model, as interfaces.

Shape suffixes: N images, P patch tokens an image, Q language tokens an image, Dv vision width, Dl language width,
B rows, T tokens a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from lavis_ds.models.configs import LanguageModelConfig, ProjectorConfig, VisionEncoderConfig


class VisionEncoder(nn.Module, ABC):
    """Pixels (N, 3, H, W) uint8 -> features (N, P, Dv). Normalises with its own statistics.

    Attributes:
        hidden_size: Dv.
        num_tokens: P.
        image_size: H = W, in pixels.
    """

    Config: ClassVar[type[VisionEncoderConfig]] = VisionEncoderConfig
    hidden_size: int
    num_tokens: int
    image_size: int

    @abstractmethod
    def forward(self, images_N3HW: Tensor) -> Tensor: ...


class Projector(nn.Module, ABC):
    """Features (N, P, Dv) -> tokens (N, Q, Dl).

    Built as `Projector(config, vision_hidden_size=Dv, language_hidden_size=Dl)`.
    """

    Config: ClassVar[type[ProjectorConfig]] = ProjectorConfig

    def __init__(self, config: ProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__()

    @abstractmethod
    def num_tokens(self, num_patches: int) -> int:
        """Q for an image of P = `num_patches` tokens."""

    @abstractmethod
    def forward(self, features_NPDv: Tensor) -> Tensor: ...


class LanguageModel(nn.Module, ABC):
    """Token embeddings -> hidden states -> logits.

    Attributes:
        hidden_size: Dl.
        vocab_size: number of rows of the output layer.
        tokenizer: the model's Hugging Face tokenizer.
    """

    Config: ClassVar[type[LanguageModelConfig]] = LanguageModelConfig
    hidden_size: int
    vocab_size: int
    tokenizer: Any

    @abstractmethod
    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """Ids -> embeddings (B, T, Dl)."""

    @abstractmethod
    def forward(self, embeds_BTDl: Tensor, position_ids_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """Embeddings -> hidden states (B, T, Dl) before the output layer.

        Causal attention; rows are padded on the right, so padding needs no mask. With `segment_ids_BT` a token attends to
        earlier tokens of its own segment and of `lavis_ds.batch.PREFIX_SEGMENT` only.
        """

    @abstractmethod
    def logits(self, hidden_KDl: Tensor) -> Tensor:
        """Hidden states of K chosen positions -> logits (K, V)."""

    @abstractmethod
    def generate(self, embeds_BTDl: Tensor, attention_mask_BT: Tensor, **options: Any) -> Tensor:
        """Continue left-padded prompts; returns only the new ids (B, T_new).

        Options are those of `transformers.GenerationMixin.generate`.
        """
