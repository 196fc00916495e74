"""Of a vision tower of transformers only what is used: layers up to the chosen one, its norm, its pixel statistics."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers.models.auto.image_processing_auto import get_image_processor_config

from lavis_ds.errors import ConfigError
from lavis_ds.models import hub

_WHERE = "model.vision"
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_STATISTICS = {"clip": _CLIP, "siglip": _HALF, "dinov2": _IMAGENET, "dinov3": _IMAGENET, "vit": _HALF}
"""Mean and std of the families' pretraining, by the beginning of model_type."""


def truncate(tower_config: Any, select_layer: int) -> None:
    """Shorten the tower, so that its output is the hidden state asked for.

    Raises:
        ConfigError: it has fewer layers.
    """
    num_states = tower_config.num_hidden_layers + 1
    if not -num_states <= select_layer < num_states:
        raise ConfigError(
            "there is no such hidden state.",
            where=f"{_WHERE}.select_layer",
            given=select_layer,
            expected=f"{-num_states} to {num_states - 1}, since the tower has {num_states - 1} layers",
        )
    tower_config.num_hidden_layers = select_layer % num_states


def detach_final_norm(tower: nn.Module) -> nn.Module:
    """Take the norm out of the tower; some families apply it to all tokens, some to the class token alone."""
    name = _final_norm_name(tower)
    if name is None:
        raise ConfigError(f"a {type(tower).__name__} has no final layer norm.", where=f"{_WHERE}.final_norm")
    norm: nn.Module = getattr(tower, name)
    setattr(tower, name, nn.Identity())
    return norm


def _final_norm_name(tower: nn.Module) -> str | None:
    known = ("post_layernorm", "layernorm", "norm")
    return next((name for name in known if isinstance(getattr(tower, name, None), nn.Module)), None)


def drop_unused(tower: Any) -> None:
    """Remove what only pooling, masking and the final norm use: a trainable parameter without gradient is a trap."""
    name = _final_norm_name(tower)
    if name is not None:
        setattr(tower, name, nn.Identity())
    for head in ("head", "pooler"):
        if getattr(tower, head, None) is not None:
            setattr(tower, head, None)
            tower.use_head = False  # SigLIP's own switch
    if getattr(tower.embeddings, "mask_token", None) is not None:
        tower.embeddings.mask_token = None


def statistics_of(path: str | None, model_type: str) -> tuple[list[float], list[float]]:
    """Mean and std: the folder's preprocessor_config.json, else those of the family."""
    if path is not None:
        with hub.explained(path, f"{_WHERE}.path"), hub.quiet():
            processor = get_image_processor_config(os.path.expanduser(path))
        if "image_mean" in processor and "image_std" in processor:
            return processor["image_mean"], processor["image_std"]
    for family, (mean, std) in _STATISTICS.items():
        if model_type.startswith(family):
            return mean, std
    raise ConfigError(
        f"the mean and std of a {model_type}'s pixels are not known.",
        where=_WHERE,
        hint="Put a preprocessor_config.json with image_mean and image_std into the folder.",
    )
