from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Blip2Config, Blip2ForConditionalGeneration

from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import LinearProjectorConfig, MLPProjectorConfig, QFormerProjectorConfig
from lavis_ds.models.projectors.linear import LinearProjector
from lavis_ds.models.projectors.mlp import MLPProjector, merge_patches
from lavis_ds.models.projectors.qformer import QFormerProjector

SIZES = {"vision_hidden_size": 24, "language_hidden_size": 40}
QFORMER: dict[str, Any] = {
    "num_query_tokens": 5,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def test_linear() -> None:
    projector = LinearProjector(LinearProjectorConfig(), **SIZES)
    assert projector.num_tokens(17) == 17
    assert projector(torch.randn(2, 17, 24)).shape == (2, 17, 40)


def test_mlp_is_linear_gelu_linear() -> None:
    projector = MLPProjector(MLPProjectorConfig(), **SIZES)
    features = torch.randn(2, 9, 24)
    first, second = projector.layers[0], projector.layers[2]
    expected = second(nn.functional.gelu(first(features)))
    torch.testing.assert_close(projector(features), expected, atol=0, rtol=0)
    assert len(MLPProjector(MLPProjectorConfig(depth=3), **SIZES).layers) == 5


def test_mlp_takes_any_number_of_tokens_unless_it_merges_them() -> None:
    """17 are 16 patches and a class token."""
    assert MLPProjector(MLPProjectorConfig(), **SIZES)(torch.randn(2, 17, 24)).shape == (2, 17, 40)


def test_merged_patches_are_neighbours() -> None:
    grid = torch.arange(16.0).view(1, 16, 1)  # 4 x 4, numbered row by row
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert merge_patches(grid, 2)[0].tolist() == expected


def test_merging_tokens() -> None:
    projector = MLPProjector(MLPProjectorConfig(merge_size=2), **SIZES)
    assert projector.num_tokens(16) == 4
    assert projector(torch.randn(2, 16, 24)).shape == (2, 4, 40)


@pytest.mark.parametrize("num_patches", [17, 9, 8])
def test_a_grid_that_cannot_be_merged(num_patches: int) -> None:
    with pytest.raises(ConfigError, match=rf"{num_patches} tokens .* 2 x 2"):
        MLPProjector(MLPProjectorConfig(merge_size=2), **SIZES).num_tokens(num_patches)


def test_qformer_equals_blip2() -> None:
    """The image half of transformers' BLIP-2 with the same weights gives the same language tokens."""
    projector = QFormerProjector(QFormerProjectorConfig(**QFORMER), **SIZES).eval()
    blip2: Any = Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config={
                "hidden_size": 24,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 28,
            },
            qformer_config={
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "encoder_hidden_size": 24,
                "use_qformer_text_input": False,
            },
            text_config={
                "model_type": "opt",
                "hidden_size": 40,
                "word_embed_proj_dim": 40,
                "ffn_dim": 40,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "vocab_size": 60,
            },
            num_query_tokens=5,
        )
    ).eval()
    blip2.qformer.load_state_dict(projector.qformer.state_dict(), strict=True)
    blip2.language_projection.load_state_dict(projector.linear.state_dict())
    with torch.no_grad():
        blip2.query_tokens.copy_(projector.query_tokens)
        features = blip2.vision_model(torch.randn(2, 3, 28, 28)).last_hidden_state
        queries = blip2.query_tokens.expand(2, -1, -1)
        hidden = blip2.qformer(
            query_embeds=queries, encoder_hidden_states=features, encoder_attention_mask=torch.ones(features.shape[:2])
        )
        expected = blip2.language_projection(hidden.last_hidden_state)
        torch.testing.assert_close(projector(features), expected, atol=1e-6, rtol=1e-5)  # measured 0
    assert projector.num_tokens(features.shape[1]) == 5


def test_qformer_gradients_and_cross_attention() -> None:
    projector = QFormerProjector(QFormerProjectorConfig(**QFORMER), **SIZES)
    projector(torch.randn(2, 17, 24)).square().sum().backward()
    assert [n for n, p in projector.named_parameters() if p.grad is None] == []
    assert [hasattr(layer, "crossattention") for layer in projector.qformer.encoder.layer] == [True, False, True]


def test_qformer_width() -> None:
    with pytest.raises(ConfigError, match="multiple of 5"):
        QFormerProjector(QFormerProjectorConfig(**(QFORMER | {"num_attention_heads": 5})), **SIZES)
