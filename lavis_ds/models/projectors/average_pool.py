"""Averages of neighbouring patches, then linear layers with GELU between (DeCo, https://arxiv.org/abs/2405.20985)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import AveragePoolProjectorConfig
from lavis_ds.models.parts import Projector
from lavis_ds.models.projectors.grid import as_grid, as_tokens, pooled_side, square_side
from lavis_ds.models.projectors.mlp import linear_layers


@registry.register_projector("average_pool")
class AveragePoolProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, Q, Dl): Q = P / kernel_size^2, or grid_size^2 whatever P is."""

    Config = AveragePoolProjectorConfig

    def __init__(
        self, config: AveragePoolProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int
    ) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        self.grid_size, self.kernel_size = config.grid_size, config.kernel_size
        self.merge_size = config.kernel_size if config.grid_size is None else None
        self.layers = linear_layers(config.depth, vision_hidden_size, language_hidden_size)

    def num_tokens(self, num_patches: int) -> int:
        side = square_side(num_patches, "average_pool")
        if self.grid_size is not None:
            return pooled_side(side, self.grid_size) ** 2
        if side % self.kernel_size:
            raise ConfigError(
                f"{side} x {side} patches can't be averaged in squares of {self.kernel_size} x {self.kernel_size}.",
                where="model.projector.kernel_size",
                given=self.kernel_size,
                expected=f"a divisor of {side}",
                hint="Or set grid_size, which needs none.",
            )
        return (side // self.kernel_size) ** 2

    def forward(self, features_NPDv: Tensor) -> Tensor:
        grid_NDvSS = as_grid(features_NPDv)
        pooled_NDvSS = (
            F.avg_pool2d(grid_NDvSS, self.kernel_size)
            if self.grid_size is None
            else F.adaptive_avg_pool2d(grid_NDvSS, self.grid_size)
        )
        tokens_NQDl: Tensor = self.layers(as_tokens(pooled_NDvSS))
        return tokens_NQDl
