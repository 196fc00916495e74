"""The Q-Former of BLIP-2 (https://arxiv.org/abs/2301.12597) and a linear layer to the language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Blip2QFormerConfig, Blip2QFormerModel

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import QFormerProjectorConfig
from lavis_ds.models.parts import Projector


@registry.register_projector("qformer")
class QFormerProjector(Projector):
    """Features (N, P, Dv) -> tokens (N, Q, Dl) with Q = num_query_tokens, whatever P is."""

    Config = QFormerProjectorConfig

    def __init__(self, config: QFormerProjectorConfig, *, vision_hidden_size: int, language_hidden_size: int) -> None:
        super().__init__(config, vision_hidden_size=vision_hidden_size, language_hidden_size=language_hidden_size)
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                "the width is no multiple of the number of attention heads.",
                where="model.projector.hidden_size",
                given=config.hidden_size,
                expected=f"a multiple of {config.num_attention_heads}",
            )
        self.query_tokens = nn.Parameter(torch.empty(1, config.num_query_tokens, config.hidden_size).normal_(std=0.02))
        self.qformer = Blip2QFormerModel(_qformer_config(config, vision_hidden_size))
        self.linear = nn.Linear(config.hidden_size, language_hidden_size)

    def num_tokens(self, num_patches: int) -> int:
        return self.query_tokens.shape[1]

    def forward(self, features_NPDv: Tensor) -> Tensor:
        queries_NQD = self.query_tokens.expand(features_NPDv.shape[0], -1, -1)
        hidden_NQD = self.qformer(query_embeds=queries_NQD, encoder_hidden_states=features_NPDv).last_hidden_state
        tokens_NQDl: Tensor = self.linear(hidden_NQD)
        return tokens_NQDl


def _qformer_config(config: QFormerProjectorConfig, vision_hidden_size: int) -> Blip2QFormerConfig:
    return Blip2QFormerConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        cross_attention_frequency=config.cross_attention_frequency,
        encoder_hidden_size=vision_hidden_size,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        use_qformer_text_input=False,
    )
