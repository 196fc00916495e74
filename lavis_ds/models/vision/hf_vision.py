"""Vision towers of transformers: CLIP, SigLIP, DINOv2 and others built alike."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models import hub
from lavis_ds.models.configs import HFVisionConfig
from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.parts import VisionEncoder
from lavis_ds.models.recomputation import recompute
from lavis_ds.models.vision.hf_tower import detach_final_norm, drop_unused, statistics_of, truncate
from lavis_ds.models.vision.pixels import PixelNorm

_WHERE = "model.vision"


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
        truncate(tower_config, config.select_layer)
        self.tower: Any = _build(config, tower_config)
        self.sourced = ("tower", "norm") if config.path else ()
        self.norm = detach_final_norm(self.tower) if config.final_norm else nn.Identity()
        drop_unused(self.tower)
        self.image_size = config.image_size or int(tower_config.image_size)
        self._options = _fit_image_size(self.tower, self.image_size)
        recompute(repeated_layers(self.tower), config, _WHERE)
        mean, std = statistics_of(config.path, str(tower_config.model_type))
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
            hint="Use siglip2_naflex." if str(whole.model_type).startswith("siglip2") else None,
        )
    return tower


def _build(config: HFVisionConfig, tower_config: Any) -> Any:
    if config.path is not None:
        return hub.load_model(AutoModel, config.path, f"{_WHERE}.path", config=tower_config, holds_more=True)
    return hub.make_model(AutoModel, tower_config)


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
