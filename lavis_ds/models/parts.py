"""The three parts of a vision-language model, as interfaces.

Shape suffixes: N images, P patch tokens an image, Q language tokens an image, Dv vision width, Dl language width,
B rows, T tokens a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import LanguageModelConfig, ProjectorConfig, VisionEncoderConfig
from lavis_ds.models.loss import TargetLosses, target_losses
from lavis_ds.models.moe.configs import MoEConfig


class Part(nn.Module):
    """What every part of a model shares.

    Attributes:
        sourced: its submodules whose weights came from a source of the part's own (a hub id, folder or file), so that a
            weights folder of the whole model may leave them out.
        fp8: which of its matrix products are in 8 bits, in a line; None where none are.
    """

    sourced: tuple[str, ...] = ()
    fp8: str | None = None

    def train_frozen(self) -> None:
        """Enter the mode of a part that is wholly frozen while others train: no dropout, no stochastic depth."""
        self.eval()

    def output_layers(self) -> tuple[nn.Module, ...]:
        """Linear layers that adapters and 4-bit weights leave out unless they are named: those that give logits."""
        return ()

    def adapters_added(self) -> None:
        """Called when modules inside were replaced: by such with adapters, or back."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Engines cast whole modules to bf16; float32 constants (pixel statistics, rotary angles) stay as they are.

        In bf16 the rounded frequencies alone turn position 1000 by more than a radian. What stands beside parameters is
        no such constant; see `match_constants`.
        """
        constants = [found for found in _constants(self) if not found[0]._parameters]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, buffer in constants:
            moved = module._buffers[name]
            if moved is not None and moved.dtype != torch.float32:
                module._buffers[name] = buffer.to(moved.device)
        return self


def match_constants(module: nn.Module) -> None:
    """Give float32 buffers that are never saved the type of the parameters beside them, which they are added to.

    timm's EVA has a zero `k_bias` between its biases. For engines that cast parameters alone.
    """
    for owner, name, buffer in list(_constants(module)):
        parameter = next((p for p in owner._parameters.values() if p is not None), None)
        if parameter is not None:
            owner._buffers[name] = buffer.to(parameter.dtype)


def _constants(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """float32 buffers that are never saved: what holds them, their name, and they."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32 and name in owner._non_persistent_buffers_set:
                yield owner, name, buffer


class VisionEncoder(Part, ABC):
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


class NativeVisionEncoder(Part, ABC):
    """Patches (P, E) uint8 of pictures of any size -> features (P, Dv), a patch each, in the same order.

    Attributes:
        hidden_size: Dv.
        patch_elements: E, two equal frames of a patch.
        num_tokens: 1, since a view is a patch.
    """

    Config: ClassVar[type[VisionEncoderConfig]] = VisionEncoderConfig
    hidden_size: int
    patch_elements: int
    num_tokens: int = 1

    @abstractmethod
    def forward(self, patches_PE: Tensor, grids_N3: Tensor, merge_size: int) -> Tensor:
        """Features.

        Args:
            patches_PE: see `lavis_ds.batch.Batch.images`.
            grids_N3: see `lavis_ds.batch.Batch.image_grids`.
            merge_size: the order of a picture's patches: square by square of so many a side.
        """


class Projector(Part, ABC):
    """Features (N, P, Dv) -> tokens (N, Q, Dl).

    Built as `Projector(config, vision_hidden_size=Dv, language_hidden_size=Dl)`.

    Attributes:
        merge_size: patches a side of the squares that become a token each, in a projector that looks at one such square
            at a time and so takes pictures of native resolution too; None in others.
    """

    Config: ClassVar[type[ProjectorConfig]] = ProjectorConfig
    merge_size: int | None = None

    def __init__(self, config: ProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__()

    @abstractmethod
    def num_tokens(self, num_patches: int) -> int:
        """Q for an image of P = `num_patches` tokens.

        Raises:
            ConfigError: images of P tokens can't be projected.
        """

    @abstractmethod
    def forward(self, features_NPDv: Tensor) -> Tensor: ...


class LanguageModel(Part, ABC):
    """Token embeddings -> hidden states -> logits.

    Attributes:
        hidden_size: Dl.
        vocab_size: number of rows of the output layer.
        num_layers: transformer layers.
        tokenizer: the model's Hugging Face tokenizer.
        attention: the attention kernel in use, as reported when a run starts.
        experts: how its experts run, likewise; None where it has none.
        balance_coefficient: of the balance loss that the model's own configuration asks for; 0 where it asks for none.
    """

    Config: ClassVar[type[LanguageModelConfig]] = LanguageModelConfig
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer: Any
    attention: str
    experts: str | None = None
    balance_coefficient: float = 0.0

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.hidden_size

    def choose_experts(self) -> None:
        """Set how experts run, and `experts`. Called once it is known whether there are any."""

    def upcycle(self, options: MoEConfig) -> None:
        """Become sparse, with experts that are copies of the dense layers.

        Raises:
            ConfigError: it can't.
        """
        raise ConfigError(
            f"a {type(self).__name__} can't be made sparse.",
            where="model.moe.num_experts",
            hint="hf_causal_lm can, with a Qwen2, Qwen3, Llama or Mistral.",
        )

    @abstractmethod
    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """Ids -> embeddings (B, T, Dl)."""

    @abstractmethod
    def forward(self, embeds_BTDl: Tensor, position_ids_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """Embeddings -> hidden states (B, T, Dl) before the output layer.

        Causal attention; rows are padded on the right, so padding needs no mask; positions count on through it. With
        `segment_ids_BT` a token attends only to earlier tokens of its own segment and of `batch.PREFIX_SEGMENT`.
        """

    @abstractmethod
    def logits(self, hidden_KDl: Tensor) -> Tensor:
        """Hidden states of K chosen positions -> logits (K, V)."""

    def losses(self, hidden_KDl: Tensor, labels_K: Tensor, weights_K: Tensor | None = None) -> TargetLosses:
        """Losses of K chosen positions, each times its weight. Here from whole logits."""
        return target_losses(self.logits(hidden_KDl), labels_K, weights_K)

    @abstractmethod
    def generate(self, embeds_BTDl: Tensor, attention_mask_BT: Tensor, **options: Any) -> Tensor:
        """Continue left-padded prompts; returns only the new ids (B, T_new).

        Options are those of `transformers.GenerationMixin.generate`.
        """
