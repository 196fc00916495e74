"""What a model becomes in transformers: a class, its configuration, and where each of its tensors comes from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.engines.base import persistent_buffers
from lavis_ds.errors import CheckpointError, ConfigError, listed
from lavis_ds.models import hub
from lavis_ds.runners.export.stored import Stored

Make = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Piece:
    """One tensor of the Hugging Face model.

    Attributes:
        sources: names of the tensors that it is made of, in this package's model; none where it is a constant.
        make: those tensors -> it; works on the meta device too, where it gives the shape.
    """

    sources: tuple[str, ...]
    make: Make = itemgetter(0)

    def then(self, change: Callable[[Tensor], Tensor]) -> Piece:
        """The same, changed at last by `change`."""
        make = self.make
        return replace(self, make=lambda tensors: change(make(tensors)))


@dataclass(frozen=True)
class Target:
    """A Hugging Face model and all that belongs into its folder.

    Attributes:
        model_class: of transformers.
        config: of that class.
        pieces: name of each of its parameters and buffers -> what it is made of.
        tokenizer: with the token that marks places of pictures.
        image_token_id: that token's id.
        image_text: what a chat template writes for a picture.
        video_text: the same for a video; None where the model takes none.
        make_processor: options of ours, image processor and chat template -> processor.
        mean: of each channel in pretraining, for pixels in 0..1.
        std: of each channel.
        needs_picture: whether its forward pass asks for a picture even where the text has none.
        notes: where it may differ from this package's model, to be said where it does.
    """

    model_class: Any
    config: Any
    pieces: Mapping[str, Piece]
    tokenizer: Any
    image_token_id: int
    image_text: str
    make_processor: Callable[[ProcessorConfig, Any, str | None], Any]
    mean: Sequence[float]
    std: Sequence[float]
    video_text: str | None = None
    needs_picture: bool = False
    notes: tuple[str, ...] = ()

    def skeleton(self) -> Any:
        """The model without its weights, and without our attention kernels, whose packages transformers would load."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"  # of all its parts
        with torch.device("meta"), hub.quiet():
            return self.model_class(config)


def cannot_express(model_class: str, why: str, *, where: str, given: object = None, expected: str = "") -> ConfigError:
    """The error for a model that a class of transformers has no place for; `why` says what that class is like."""
    return ConfigError(
        f"this model can't be exported as a {model_class} of transformers: {why}.",
        where=where,
        given=given,
        expected=expected or None,
    )


def moved(model: nn.Module, prefixes: Mapping[str, str]) -> dict[str, Piece]:
    """Pieces for all tensors below some prefixes, which other prefixes take the place of."""
    pieces: dict[str, Piece] = {}
    for name in tensor_names(model):
        for old, new in prefixes.items():
            if name.startswith(old):
                pieces[new + name.removeprefix(old)] = Piece((name,))
    return pieces


def tensor_names(model: nn.Module) -> list[str]:
    """Names of parameters (tied ones once) and persistent buffers: what a checkpoint holds."""
    return [name for name, _ in model.named_parameters()] + [name for name, _ in persistent_buffers(model)]


def constant(shape: Sequence[int], value: float) -> Piece:
    """A tensor that the other model has and this one does without."""
    return Piece((), lambda _: torch.full(tuple(shape), value))


def checked(target: Target, tensors: Mapping[str, Stored]) -> Any:
    """The target's skeleton, once each of its tensors is known to be made, of the right shape, and none is left over.

    Raises:
        CheckpointError: tensors are missing, left over, or of another shape.
    """
    skeleton = target.skeleton()
    wanted, tied = set(tensor_names(skeleton)), set(skeleton.all_tied_weights_keys)
    sources = {name for piece in target.pieces.values() for name in piece.sources}
    findings = [
        *(f"{name} is not in the checkpoint" for name in sorted(sources - tensors.keys())),
        *(f"{name} of the checkpoint has no place" for name in sorted(tensors.keys() - sources)),
        *(f"{name} of the exported model comes from nowhere" for name in sorted(wanted - tied - target.pieces.keys())),
        *(f"the exported model has no {name}" for name in sorted(target.pieces.keys() - wanted)),
    ]
    if not findings:
        shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        for name, piece in target.pieces.items():
            shape = tuple(piece.make([tensors[source].empty() for source in piece.sources]).shape)
            if shape != shapes[name]:
                findings.append(f"{name} would be {shape} and not {shapes[name]}")
    if findings:
        kind = target.model_class.__name__
        text = listed(findings[:5], len(findings))
        raise CheckpointError(f"the checkpoint's tensors do not make up a {kind}:{text}\n", where="weights")
    return skeleton
