"""Vision Transformers of timm (https://github.com/huggingface/pytorch-image-models): ViT, EVA, SigLIP, DINOv2, ..."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds import registry
from lavis_ds.errors import CheckpointError, ConfigError, did_you_mean
from lavis_ds.models.configs import TimmViTConfig
from lavis_ds.models.conversion.source import open_weights
from lavis_ds.models.conversion.stored import Stored
from lavis_ds.models.parts import VisionEncoder
from lavis_ds.models.recomputation import recompute
from lavis_ds.models.skeleton import reads_weights
from lavis_ds.models.vision.pixels import PixelNorm

_WHERE = "model.vision"
_LAVIS = "visual_encoder."


@registry.register_vision_encoder("timm_vit")
class TimmViT(VisionEncoder):
    """Tokens of one block of a timm Vision Transformer.

    Raises:
        ConfigError: the name, an argument or the layer does not exist, or the model is no Vision Transformer.
        CheckpointError: the weights can't be had, or do not fit.
    """

    Config = TimmViTConfig

    def __init__(self, config: TimmViTConfig) -> None:
        super().__init__()
        self.vit: Any = _create(config)
        full = set(self.vit.state_dict())
        _keep_only(self.vit, config)
        if config.weights is not None and reads_weights():
            _load(self.vit, Path(config.weights), ignored=full)
        recompute(self.vit.blocks, config, _WHERE)
        self.sourced = ("vit",) if config.pretrained or config.weights else ()
        self.hidden_size = int(self.vit.embed_dim)
        self.image_size = config.image_size
        self.layer_norm = nn.LayerNorm(self.hidden_size) if config.layer_norm else nn.Identity()
        statistics = self.vit.pretrained_cfg
        self.pixels = PixelNorm(config.mean or statistics["mean"], config.std or statistics["std"], config.image_size)
        self._num_dropped = int(self.vit.num_prefix_tokens) if config.select_tokens == "patch" else 0
        self.num_tokens = int(self.vit.patch_embed.num_patches + self.vit.num_prefix_tokens) - self._num_dropped

    def forward(self, images_N3HW: Tensor) -> Tensor:
        # The whole module is called, not its pieces: under ZeRO-3 its forward hook gathers class token and positions.
        tokens_NPD = self.vit(self.pixels(images_N3HW).to(next(self.vit.parameters()).dtype))
        normed_NPD: Tensor = self.layer_norm(tokens_NPD)
        return normed_NPD[:, self._num_dropped :]


def _create(config: TimmViTConfig) -> Any:
    import timm  # takes seconds

    if not timm.is_model(config.model_name):
        raise ConfigError(
            "timm has no model of this name.",
            where=f"{_WHERE}.model_name",
            given=config.model_name,
            hint=did_you_mean(config.model_name, timm.list_models()) or "timm.list_models() lists all of them.",
        )
    try:
        vit: Any = timm.create_model(
            config.model_name,
            pretrained=config.pretrained and reads_weights(),
            num_classes=0,
            img_size=config.image_size,
            drop_path_rate=config.drop_path_rate,
            **config.model_args,
        )
    except OSError as error:
        raise CheckpointError(
            f"timm's weights of {config.model_name} are neither in the cache nor reachable.",
            where=f"{_WHERE}.pretrained",
            hint="Without internet, copy the file here and name it in `weights`.",
        ) from error
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"timm can't build {config.model_name} with these options: {error}.",
            where=_WHERE,
            given=str({"image_size": config.image_size, **config.model_args}),
        ) from error
    _check_image_size(vit, config)
    if not hasattr(vit, "prune_intermediate_layers") or not hasattr(vit, "num_prefix_tokens"):
        raise ConfigError("this is no Vision Transformer.", where=f"{_WHERE}.model_name", given=config.model_name)
    return vit


def _check_image_size(vit: Any, config: TimmViTConfig) -> None:
    """Refuse what timm would take, dropping the pixels beyond the last whole patch."""
    patch_size = getattr(getattr(vit, "patch_embed", None), "patch_size", (1, 1))
    if any(config.image_size % size for size in patch_size):
        raise ConfigError(
            "the image size is no multiple of the patch size.",
            where=f"{_WHERE}.image_size",
            given=config.image_size,
            expected=f"a multiple of {patch_size[0]}",
        )


def _keep_only(vit: Any, config: TimmViTConfig) -> None:
    """Drop the classifier, the pooling and the blocks after the selected one."""
    depth = len(vit.blocks)
    if not -depth <= config.select_layer < depth:
        raise ConfigError(
            "there is no such block.",
            where=f"{_WHERE}.select_layer",
            given=config.select_layer,
            expected=f"{-depth} to {depth - 1}, since {config.model_name} has {depth} blocks",
        )
    norm = vit.fc_norm if isinstance(vit.norm, nn.Identity) else vit.norm  # after the pooling in models that average
    vit.prune_intermediate_layers([config.select_layer % depth], prune_head=True)
    vit.norm = norm if config.final_norm else nn.Identity()
    vit.forward_head = _all_tokens  # distilled models would average two tokens, head or no head


def _all_tokens(tokens_NPD: Tensor) -> Tensor:
    return tokens_NPD


def _load(vit: Any, path: Path, ignored: set[str]) -> None:
    """Load strictly, one tensor at a time; what was dropped from the model may stand in the file.

    Of a LAVIS file with more than the tower, the tower is taken.
    """
    found = open_weights(path)
    stored = {k.removeprefix(_LAVIS): tensor for k, tensor in found.items() if k.startswith(_LAVIS)} or found
    own = vit.state_dict(keep_vars=True)
    missing = sorted(own.keys() - stored.keys())
    unknown = sorted(k for k in stored.keys() - own.keys() - ignored if not k.startswith(("head.", "fc_norm.")))
    resized = {"pos_embed"} if _is_square_grid(vit, stored) else set()
    shapes = sorted(k for k in (own.keys() & stored.keys()) - resized if tuple(own[k].shape) != stored[k].shape)
    for what, names in (("lacks", missing), ("has unknown", unknown), ("has other shapes of", shapes)):
        if names:
            raise CheckpointError(
                f"this file {what} {len(names)} tensors: {', '.join(names[:3])}{', ...' if names[3:] else ''}.",
                where=str(path),
                hint="Is it of another model_name, image_size or model_args?",
            )
    for name, tensor in own.items():
        with torch.no_grad():
            tensor.copy_(_resized(vit, stored[name].read()) if name in resized else stored[name].read())


def _is_square_grid(vit: Any, stored: Mapping[str, Stored]) -> bool:
    """Whether the file has positions of a square of patches, which can be resized to the model's."""
    shape = stored["pos_embed"].shape if "pos_embed" in stored else ()
    if len(shape) != 3 or shape[2] != vit.embed_dim or getattr(vit, "no_embed_class", False):
        return False
    num_patches = shape[1] - int(vit.num_prefix_tokens)
    return num_patches > 0 and math.isqrt(num_patches) ** 2 == num_patches


def _resized(vit: Any, positions: Tensor) -> Tensor:
    """Positions of pretraining at this image size, as in LAVIS: bicubic."""
    from timm.layers import resample_abs_pos_embed

    grid = list(vit.patch_embed.grid_size)
    made: Tensor = resample_abs_pos_embed(positions, grid, num_prefix_tokens=vit.num_prefix_tokens, antialias=False)
    return made
