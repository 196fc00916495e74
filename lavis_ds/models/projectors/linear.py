"""One linear layer (LLaVA, https://arxiv.org/abs/2304.08485)."""

from __future__ import annotations

from torch import Tensor, nn

from lavis_ds import registry
from lavis_ds.models.configs import LinearProjectorConfig
from lavis_ds.models.parts import Projector


@registry.register_projector("linear")
class LinearProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, P, Dl)."""

    Config = LinearProjectorConfig
    merge_size = 1

    def __init__(self, config: LinearProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        self.linear = nn.Linear(vision_hidden_size, language_hidden_size)

    def num_tokens(self, num_patches: int) -> int:
        return num_patches

    def forward(self, features_NPDv: Tensor) -> Tensor:
        tokens_NQDl: Tensor = self.linear(features_NPDv)
        return tokens_NQDl
