"""The C-Abstractor of Honeybee (https://arxiv.org/abs/2312.06742): convolutions around an average pool."""

from __future__ import annotations

import torch
from timm.layers import LayerNorm2d
from timm.models.regnet import RegStage
from torch import Tensor, nn

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import CAbstractorProjectorConfig
from lavis_ds.models.parts import Projector
from lavis_ds.models.projectors.grid import as_grid, as_tokens, pooled_side, square_side
from lavis_ds.models.projectors.mlp import linear_layers


@registry.register_projector("c_abstractor")
class CAbstractorProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, Q, Dl) with Q = grid_size^2, whatever P is.

    RegNet blocks with squeeze and excitation, an adaptive average pool, as many blocks again, linear layers. Parameters
    have the names of Honeybee's own `CAbstractor`.

    Source: https://github.com/khanrc/honeybee, honeybee/projectors/projectors.py.
    """

    Config = CAbstractorProjectorConfig

    def __init__(
        self, config: CAbstractorProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int
    ) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        self.grid_size = config.grid_size
        self.pos_emb: nn.Parameter | None = None
        if config.num_positions is not None:
            table_1PDv = torch.empty(1, config.num_positions, vision_hidden_size)
            self.pos_emb = nn.Parameter(nn.init.trunc_normal_(table_1PDv, std=0.02))
        self.net = nn.Sequential(
            _blocks(config.depth, vision_hidden_size, config.hidden_size),
            nn.AdaptiveAvgPool2d(config.grid_size),
            _blocks(config.depth, config.hidden_size, config.hidden_size),
        )
        self.readout = linear_layers(config.mlp_depth, config.hidden_size, language_hidden_size, nn.SiLU)

    def num_tokens(self, num_patches: int) -> int:
        side = square_side(num_patches, "c_abstractor")
        if self.pos_emb is not None and self.pos_emb.shape[1] != num_patches:
            raise ConfigError(
                f"there are positions for {self.pos_emb.shape[1]} patches, and an image has {num_patches}.",
                where="model.projector.num_positions",
                given=self.pos_emb.shape[1],
                expected=str(num_patches),
            )
        return pooled_side(side, self.grid_size) ** 2

    def forward(self, features_NPDv: Tensor) -> Tensor:
        if self.pos_emb is not None:
            features_NPDv = features_NPDv + self.pos_emb
        tokens_NQDl: Tensor = self.readout(as_tokens(self.net(as_grid(features_NPDv))))
        return tokens_NQDl


def _blocks(depth: int, width: int, new_width: int) -> nn.Module:
    made: nn.Module = RegStage(depth, width, new_width, stride=1, dilation=1, act_layer=nn.SiLU, norm_layer=LayerNorm2d)
    return made
