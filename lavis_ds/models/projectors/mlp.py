"""Linear layers with GELU between (LLaVA-1.5, https://arxiv.org/abs/2310.03744), after merging neighbouring patches."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import MLPProjectorConfig
from lavis_ds.models.parts import Projector


@registry.register_projector("mlp")
class MLPProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, P / merge_size^2, Dl)."""

    Config = MLPProjectorConfig
    merge_size: int

    def __init__(self, config: MLPProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        self.merge_size = config.merge_size
        width = vision_hidden_size * config.merge_size**2
        norm = [nn.LayerNorm(width)] if config.layer_norm else []
        self.layers = nn.Sequential(*norm, *linear_layers(config.depth, width, language_hidden_size))

    def num_tokens(self, num_patches: int) -> int:
        if self.merge_size == 1:
            return num_patches
        side = math.isqrt(num_patches)
        if side**2 != num_patches or side % self.merge_size:
            raise ConfigError(
                f"{num_patches} tokens an image can't be merged in squares of {self.merge_size} x {self.merge_size}.",
                where="model.projector.merge_size",
                given=self.merge_size,
                expected=f"a square grid of patches with a side that {self.merge_size} divides",
                hint="Change vision.image_size, or set vision.select_tokens to patch: a class token is no patch.",
            )
        return (side // self.merge_size) ** 2

    def forward(self, features_NPDv: Tensor) -> Tensor:
        tokens_NQDl: Tensor = self.layers(merge_patches(features_NPDv, self.merge_size))
        return tokens_NQDl


def linear_layers(depth: int, width: int, new_width: int, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """`depth` linear layers with activations between; the first one changes the width."""
    layers: list[nn.Module] = [nn.Linear(width, new_width)]
    for _ in range(depth - 1):
        layers += [activation(), nn.Linear(new_width, new_width)]
    return nn.Sequential(*layers)


def merge_patches(features_NPD: Tensor, size: int) -> Tensor:
    """Squares of `size` x `size` patches, row by row, side by side in one token: (N, P / size^2, D * size^2).

    Source: pixel unshuffle (https://arxiv.org/abs/1609.05158); the order within a token is that of transformers'
    `pixel_shuffle` in InternVL (https://arxiv.org/abs/2404.16821) and in Idefics3.
    """
    if size == 1:  # any number of tokens, class tokens among them
        return features_NPD
    num_images, num_patches, width = features_NPD.shape
    side = math.isqrt(num_patches) // size
    grid = features_NPD.reshape(num_images, side, size, side, size, width).transpose(2, 3)
    return grid.reshape(num_images, side**2, size**2 * width)
