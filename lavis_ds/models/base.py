"""What a model is to the rest of the framework: built from options, made of parts, some of them frozen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.config.schema import ModelConfig
from lavis_ds.models.parts import Part
from lavis_ds.models.patterns import parameters_of
from lavis_ds.models.skeleton import reads_weights
from lavis_ds.models.weights import load_weights


@dataclass(frozen=True)
class Work:
    """What training on a sample costs, in any unit: what packed rows are shared out among ranks by.

    Attributes:
        per_token: of each token.
        per_pair: of each pair of tokens that attend.
        per_view: of each view of a picture.
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    per_view: float = 0.0

    def of(self, tokens: int, views: int) -> float:
        """Cost of one sample."""
        return self.per_token * tokens + self.per_pair * tokens**2 / 2 + self.per_view * views


class Model(nn.Module, ABC):
    """Subclass, set `Config`, register with `@registry.register_model("name")`.

    Attributes:
        config: its options, an instance of `Config`.
    """

    Config: ClassVar[type[ModelConfig]] = ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        """The model with the weights its options name, frozen as they say, in training mode, float32 on the CPU.

        Raises:
            ConfigError: parts do not fit each other, or `freeze` names nothing.
            CheckpointError: weights are missing or do not fit.
        """
        model = cls(config)
        if config.pretrained is not None and reads_weights():
            load_weights(model, config.pretrained)
        model.freeze(config.freeze)
        return model.train()

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Float32 tensors in a tuple, which DeepSpeed can walk.

        Sum of token losses; number of right targets; sums of token losses by dataset (D,), as `Batch.by_dataset` counts
        them; then what else a model's own task asks for.
        """

    @abstractmethod
    def generate(self, batch: Batch, **options: Any) -> Tensor:
        """Continue a left-padded batch of prompts; new ids only (B, T_new). Options as in transformers' generate."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The language model's Hugging Face tokenizer."""

    @property
    @abstractmethod
    def tokens_per_image(self) -> int | Fraction:
        """Q, the places that a view of a picture takes among the tokens.

        At native resolution a view is a patch, and Q a fraction: 1/4 where squares of 2 x 2 patches become a token.
        """

    @property
    @abstractmethod
    def image_size(self) -> int | None:
        """Height and width of the pictures, in pixels; None at native resolution."""

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Shape of a view: (3, H, W), or (D,) of a patch at native resolution; None where there is no vision part."""
        return None if self.image_size is None else (3, self.image_size, self.image_size)

    @property
    def merge_size(self) -> int | None:
        """Patches a side that become one token, in a model of native resolution; None in others."""
        return None

    @property
    def image_marks(self) -> tuple[str, str] | None:
        """Special tokens that stand before and after each picture, where the model was trained with such."""
        return None

    def describe(self) -> dict[str, str]:
        """What the start of a run should say about choices made here, such as the attention kernel."""
        return {}

    def work(self) -> Work:
        """What a sample costs; its tokens where a model knows no better. Asked before parameters are sharded."""
        return Work()

    def parts(self) -> dict[str, nn.Module]:
        """Name -> part, in order; the names are the first component of parameter names."""
        return dict(self.named_children())

    def freeze(self, patterns: list[str]) -> None:
        """Switch training off for parts, modules or patterns of parameters.

        Raises:
            ConfigError: one of them matches nothing.
        """
        parameters = dict(self.named_parameters())
        for pattern in patterns:
            for name in parameters_of(self, pattern, "model.freeze"):
                parameters[name].requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """As in PyTorch, but wholly frozen parts, and their wholly frozen submodules, stay without dropout."""
        super().train(mode)
        for part in self.parts().values():
            if mode and isinstance(part, Part) and is_frozen(part):
                part.train_frozen()
            elif mode:
                for module in part.children():
                    module.train(not is_frozen(module))
        return self


def is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def matrix_elements(module: nn.Module) -> int:
    """Elements of the module's matrices, those of embeddings left out, which no product reads as a whole."""
    return sum(
        parameter.numel()
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
        if parameter.dim() > 1
    )
