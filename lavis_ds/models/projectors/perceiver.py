"""The perceiver resampler of Idefics2 (https://arxiv.org/abs/2405.02246), after Flamingo's (2204.14198)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2MLP, Idefics2PerceiverResampler

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import PerceiverProjectorConfig
from lavis_ds.models.parts import Projector


@registry.register_projector("perceiver")
class PerceiverProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, Q, Dl) with Q = num_latents, whatever P is.

    Its parameters have the names of transformers' `Idefics2Connector`.
    """

    Config = PerceiverProjectorConfig

    def __init__(self, config: PerceiverProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        if config.num_attention_heads % config.num_key_value_heads:
            raise ConfigError(
                "the heads of keys and values can't be shared out among the attention heads.",
                where="model.projector.num_key_value_heads",
                given=config.num_key_value_heads,
                expected=f"a divisor of {config.num_attention_heads}",
            )
        make_mlp: Any = Idefics2MLP
        self.modality_projection: nn.Module = make_mlp(
            hidden_size=vision_hidden_size,
            intermediate_size=config.intermediate_size or 4 * language_hidden_size,
            output_size=language_hidden_size,
            hidden_act="silu",
        )
        self.perceiver_resampler: Any = Idefics2PerceiverResampler(_resampler_config(config, language_hidden_size))
        nn.init.normal_(self.perceiver_resampler.latents)  # they are made as ones: equal ones would stay equal

    def num_tokens(self, num_patches: int) -> int:
        return int(self.perceiver_resampler.n_latents)

    def forward(self, features_NPDv: Tensor) -> Tensor:
        context_NPDl = self.modality_projection(features_NPDv)
        mask_NP = torch.ones(context_NPDl.shape[:2], dtype=torch.bool, device=context_NPDl.device)
        tokens_NQDl: Tensor = self.perceiver_resampler(context=context_NPDl, attention_mask=mask_NP)
        return tokens_NQDl


def _resampler_config(config: PerceiverProjectorConfig, hidden_size: int) -> Idefics2PerceiverConfig:
    return Idefics2PerceiverConfig(
        hidden_size=hidden_size,
        resampler_n_latents=config.num_latents,
        resampler_depth=config.num_hidden_layers,
        resampler_n_heads=config.num_attention_heads,
        resampler_head_dim=config.head_dim,
        num_key_value_heads=config.num_key_value_heads,
        attention_dropout=config.dropout,
    )
