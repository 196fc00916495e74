"""What a model is to the rest of the framework: built from options, made of parts, some of them frozen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.config.schema import ModelConfig, ParamGroupConfig
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import AdaptedConfig, LayersConfig
from lavis_ds.models.conversion.source import opened_once
from lavis_ds.models.fp8 import use_fp8
from lavis_ds.models.frozen import Origin, origins
from lavis_ds.models.parts import Part
from lavis_ds.models.patterns import parameters_of
from lavis_ds.models.quantised import quantise
from lavis_ds.models.skeleton import reads_weights
from lavis_ds.models.weights import Loaded, holds_adapters, load_weights, start_notices
from lavis_ds.models.work import Work


@dataclass(frozen=True)
class StepSettings:
    """What a model has to say about an optimizer step.

    Attributes:
        metrics: name -> number (or list of integers), over all micro-batches and ranks.
        lr_factors: name of a parameter group -> factor of its learning rate in this step.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    lr_factors: Mapping[str, float] = field(default_factory=dict)


class Model(nn.Module, ABC):
    """Subclass, set `Config`, register with `@registry.register_model("name")`.

    Attributes:
        config: its options, an instance of `Config`.
        notices: what the start of a new run should say of its weights, a line each.
        origins: name of a parameter -> where its weights can be read again; without those that were made here.
    """

    Config: ClassVar[type[ModelConfig]] = ModelConfig
    notices: Sequence[str] = ()
    origins: Mapping[str, Origin] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    @opened_once()
    def from_config(cls, config: ModelConfig) -> Self:
        """The model with the weights its options name, frozen as they say, in training mode, float32 on the CPU.

        Raises:
            ConfigError: parts do not fit each other, or `freeze` names nothing.
            CheckpointError: weights are missing or do not fit.
        """
        model = cls(config)
        sources = _sources(config) if reads_weights() else []

        def fill(*, partial: bool, adapted: bool) -> list[Loaded]:
            chosen = [path for path, *kind in sources if kind == [partial, adapted]]
            return [load_weights(model, path, partial=partial) for path in chosen]

        loads = [*fill(partial=False, adapted=False), *model.complete()]
        model.freeze(config.freeze)
        loads += fill(partial=True, adapted=False)
        model.adapt()  # adapters start from the weights they go beside, so these are there by now
        loads += [*fill(partial=False, adapted=True), *fill(partial=True, adapted=True)]
        model.notices = start_notices(model, loads) if reads_weights() else []
        model.origins = origins(model, loads)
        return model.train()

    def adapt(self) -> None:
        """Store parts in other formats, put adapters into them, and let them multiply in 8 bits, as their options say.

        Raises:
            ConfigError: the adapters do not suit the part, `dtype` is given for weights that train, or 8 bits can't be.
        """
        for name, part in self.parts().items():
            options: AdaptedConfig | None = getattr(self.config, name, None)
            if not isinstance(options, AdaptedConfig) or not isinstance(part, Part):
                continue
            if options.quantize is not None and reads_weights():
                quantise(part, options.quantize, f"model.{name}.quantize")
            if options.dtype is not None:
                if options.lora is None and not is_frozen(part):
                    raise ConfigError(
                        "only weights that do not train have a number format of their own.",
                        where=f"model.{name}.dtype",
                        given=options.dtype,
                        hint=f"Put {name} into model.freeze, or leave dtype out: run.precision says how it trains.",
                    )
                part.to(getattr(torch, options.dtype))
            if options.lora is not None:
                from lavis_ds.models import adapters  # PEFT takes seconds to import

                adapters.add_adapters(part, options.lora, f"model.{name}.lora")
            if isinstance(options, LayersConfig) and options.fp8 != "none":
                part.fp8 = use_fp8(part, options.fp8, f"model.{name}.fp8")

    def complete(self) -> list[Loaded]:
        """What a model still has to do once `pretrained` is in, before anything is frozen. Returns what it filled."""
        return []

    def made_parts(self) -> list[str]:
        """Names of parts whose weights were made here of others, and so can't be read again as they are."""
        return []

    def own_groups(self) -> dict[str, ParamGroupConfig]:
        """Pattern -> settings of parameters that the model's own options name; they go before `run.param_groups`."""
        return {}

    def before_step(self, step: int) -> StepSettings:
        """Called once an optimizer step, on all ranks, after the last micro-batch and before weights are updated.

        Args:
            step: the one that is about to be taken; the first is 1.
        """
        return StepSettings()

    @abstractmethod
    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Float32 tensors in a tuple, which DeepSpeed can walk.

        Sum of token losses, to which a model in training adds what else it is to minimise, on the same scale; number of
        right targets; sums of token losses by dataset (D,), as `Batch.by_dataset` counts them; then what else a model's
        own task asks for.
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
    def has_mrope(self) -> bool:
        """Whether positions are those in time, height and width (multimodal rotary positions)."""
        return False

    @property
    def image_marks(self) -> tuple[str, str] | None:
        """Special tokens that stand before and after each picture, where the model was trained with such."""
        return None

    @property
    def placeholders(self) -> tuple[str, str] | None:
        """Special tokens on the places of pictures and on those of videos, where the model was trained with such."""
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second of video, in a model of native resolution that places frames in time.

        None in one that reads their times as text, and in those that take frames as pictures.
        """
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


def _sources(config: ModelConfig) -> list[tuple[str, bool, bool]]:
    """The weights that go over those of parts: path, whether some parts are enough, whether adapters are in it."""
    paths = ((config.pretrained, False), (config.finetuned, True))
    return [(str(path), partial, holds_adapters(path)) for path, partial in paths if path is not None]


def is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters and none of them trains."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """Number format of the module's weights, which its inputs must have."""
    return next(module.parameters()).dtype
