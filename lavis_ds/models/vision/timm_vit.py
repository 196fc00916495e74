"""Vision Transformers of timm (https://github.com/huggingface/pytorch-image-models): ViT, EVA, SigLIP, DINOv2, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds import registry
from lavis_ds.errors import CheckpointError, ConfigError, did_you_mean
from lavis_ds.models.configs import TimmViTConfig
from lavis_ds.models.parts import VisionEncoder
from lavis_ds.models.skeleton import reads_weights
from lavis_ds.models.vision.pixels import PixelNorm

_WHERE = "model.vision"


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
        self.vit.set_grad_checkpointing(config.gradient_checkpointing)
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
    if not hasattr(vit, "prune_intermediate_layers") or not hasattr(vit, "num_prefix_tokens"):
        raise ConfigError("this is no Vision Transformer.", where=f"{_WHERE}.model_name", given=config.model_name)
    return vit


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


def _load(vit: nn.Module, path: Path, ignored: set[str]) -> None:
    """Load strictly; what was dropped from the model may stand in the file."""
    import timm

    try:
        state: dict[str, Tensor] = timm.models.load_state_dict(str(path), use_ema=False, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError("there is no such file.", where=f"{_WHERE}.weights", given=str(path)) from error
    except Exception as error:
        raise CheckpointError(f"this is no file of weights ({type(error).__name__}).", where=str(path)) from error
    own = vit.state_dict()
    missing = sorted(own.keys() - state.keys())
    unknown = sorted(k for k in state.keys() - own.keys() - ignored if not k.startswith(("head.", "fc_norm.")))
    shapes = sorted(k for k in own.keys() & state.keys() if own[k].shape != state[k].shape)
    for what, names in (("lacks", missing), ("has unknown", unknown), ("has other shapes of", shapes)):
        if names:
            raise CheckpointError(
                f"this file {what} {len(names)} tensors: {', '.join(names[:3])}{', ...' if names[3:] else ''}.",
                where=str(path),
                hint="Is it of another model_name, image_size or model_args?",
            )
    with torch.no_grad():
        vit.load_state_dict({k: state[k] for k in own})
