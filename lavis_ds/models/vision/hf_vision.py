"""Vision towers of transformers: CLIP, SigLIP, DINOv2 and others built alike."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.image_processing_auto import get_image_processor_config

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models import hub
from lavis_ds.models.configs import HFVisionConfig
from lavis_ds.models.parts import VisionEncoder
from lavis_ds.models.vision.pixels import PixelNorm

_WHERE = "model.vision"
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_STATISTICS = {"clip": _CLIP, "siglip": _HALF, "dinov2": _IMAGENET, "dinov3": _IMAGENET, "vit": _HALF}
"""Mean and std of the families' pretraining, by the beginning of model_type."""


@registry.register_vision_encoder("hf_vision")
class HFVision(VisionEncoder):
    """`hidden_states[select_layer]` of a vision tower; the layers after it do not exist.

    Raises:
        ConfigError: the layer or the image size is impossible, or the model is no such tower.
        CheckpointError: the folder or hub id does not hold the model's weights.
    """

    Config = HFVisionConfig

    def __init__(self, config: HFVisionConfig) -> None:
        super().__init__()
        tower_config = _tower_config(config)
        _truncate(tower_config, config.select_layer)
        self.tower: Any = _build(config, tower_config)
        self.sourced = ("tower", "norm") if config.path else ()
        self.norm = _detach_final_norm(self.tower) if config.final_norm else nn.Identity()
        _drop_unused(self.tower)
        self.image_size = config.image_size or int(tower_config.image_size)
        self._options = _fit_image_size(self.tower, self.image_size)
        if config.gradient_checkpointing:
            self.tower.gradient_checkpointing_enable({"use_reentrant": False})
        mean, std = _statistics(config.path, str(tower_config.model_type))
        self.pixels = PixelNorm(mean, std, self.image_size)
        self.hidden_size = int(tower_config.hidden_size)
        self.num_prefix_tokens = _num_prefix_tokens(self.tower)
        self._num_dropped = self.num_prefix_tokens if config.select_tokens == "patch" else 0
        num_patches = (self.image_size // int(tower_config.patch_size)) ** 2
        self.num_tokens = num_patches + self.num_prefix_tokens - self._num_dropped

    def forward(self, images_N3HW: Tensor) -> Tensor:
        pixels_N3HW = self.pixels(images_N3HW).to(next(self.tower.parameters()).dtype)
        hidden_NPD = self.norm(self.tower(pixel_values=pixels_N3HW, **self._options).last_hidden_state)
        tokens_NPD: Tensor = hidden_NPD[:, self._num_dropped :]
        return tokens_NPD


def _tower_config(config: HFVisionConfig) -> Any:
    """The tower's own configuration, also where it is one half of a CLIP or SigLIP model."""
    if config.path is not None:
        whole = hub.read_config(config.path, f"{_WHERE}.path")
    else:
        shape = dict(config.config or {})
        shape |= {"image_size": config.image_size} if config.image_size else {}
        whole = hub.config_of_shape(shape, f"{_WHERE}.config")
    tower = getattr(whole, "vision_config", whole)
    lacking = [k for k in ("hidden_size", "num_hidden_layers", "patch_size", "image_size") if not hasattr(tower, k)]
    if lacking:
        raise ConfigError(
            f"a {whole.model_type} can't be used as a vision tower; its configuration lacks {', '.join(lacking)}.",
            where=_WHERE,
            expected="CLIP, SigLIP, DINOv2 or another plain Vision Transformer",
        )
    return tower


def _truncate(tower_config: Any, select_layer: int) -> None:
    """Shorten the tower, so that its output is the hidden state asked for."""
    num_states = tower_config.num_hidden_layers + 1
    if not -num_states <= select_layer < num_states:
        raise ConfigError(
            "there is no such hidden state.",
            where=f"{_WHERE}.select_layer",
            given=select_layer,
            expected=f"{-num_states} to {num_states - 1}, since the tower has {num_states - 1} layers",
        )
    tower_config.num_hidden_layers = select_layer % num_states


def _build(config: HFVisionConfig, tower_config: Any) -> Any:
    if config.path is not None:
        return hub.load_model(AutoModel, config.path, f"{_WHERE}.path", config=tower_config, holds_more=True)
    return hub.make_model(AutoModel, tower_config)


def _detach_final_norm(tower: nn.Module) -> nn.Module:
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


def _drop_unused(tower: Any) -> None:
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


def _fit_image_size(tower: Any, size: int) -> dict[str, Any]:
    """Prepare for pictures of another size than in pretraining; returns what to add to each call.

    Raises:
        ConfigError: the size is no multiple of the patch size, or the model can't interpolate its positions.
    """
    embeddings, config = tower.embeddings, tower.config
    if size == config.image_size:  # need not be a multiple: SigLIP so400m cuts 384 px into 27 patches of 14
        return {}
    if size % config.patch_size:
        raise ConfigError(
            "the image size is no multiple of the patch size.",
            where=f"{_WHERE}.image_size",
            given=size,
            expected=f"a multiple of {config.patch_size}",
        )
    if hasattr(tower, "rope_embeddings"):
        return {}
    if not hasattr(embeddings, "interpolate_pos_encoding"):
        raise ConfigError(
            f"a {type(tower).__name__} can't interpolate its positions.",
            where=f"{_WHERE}.image_size",
            given=size,
            expected=str(config.image_size),
        )
    if isinstance(getattr(embeddings, "position_embedding", None), nn.Embedding):
        _resize_positions(embeddings, size)
        return {}
    switchable = "interpolate_pos_encoding" in inspect.signature(tower.forward).parameters
    return {"interpolate_pos_encoding": True} if switchable else {}


@torch.no_grad()
def _resize_positions(embeddings: Any, size: int) -> None:
    """Interpolate CLIP's or SigLIP's table once, here.

    In the forward pass they would read the weight of a submodule that is not called, which ZeRO-3 has not gathered.
    """
    old: nn.Embedding = embeddings.position_embedding
    num_prefix = old.num_embeddings - (embeddings.image_size // embeddings.patch_size) ** 2
    num_positions = (size // embeddings.patch_size) ** 2 + num_prefix
    placeholder = old.weight.new_empty(1, num_positions, old.embedding_dim)  # only its shape is used
    table_1PD: Tensor = embeddings.interpolate_pos_encoding(placeholder, size, size)
    embeddings.position_embedding = nn.Embedding(num_positions, old.embedding_dim)
    embeddings.position_embedding.weight.copy_(table_1PD[0])
    embeddings.position_ids = torch.arange(num_positions).expand(1, -1)
    embeddings.image_size, embeddings.num_positions = size, num_positions


def _num_prefix_tokens(tower: Any) -> int:
    """Class, distillation and register tokens before the patch tokens."""
    tokens = {"class_embedding", "cls_token", "distillation_token", "register_tokens"}
    own = dict(tower.embeddings.named_parameters(recurse=False))
    return sum(own[name].shape[-2] if own[name].ndim > 1 else 1 for name in tokens & own.keys())


def _statistics(path: str | None, model_type: str) -> tuple[list[float], list[float]]:
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
