from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Idefics2Config,
    Idefics3Config,
    InternVLConfig,
    InternVLModel,
)
from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import (
    AveragePoolProjectorConfig,
    CAbstractorProjectorConfig,
    LinearProjectorConfig,
    MLPProjectorConfig,
    PerceiverProjectorConfig,
    QFormerProjectorConfig,
)
from lavis_ds.models.parts import Projector
from lavis_ds.models.projectors.average_pool import AveragePoolProjector
from lavis_ds.models.projectors.c_abstractor import CAbstractorProjector
from lavis_ds.models.projectors.linear import LinearProjector
from lavis_ds.models.projectors.mlp import MLPProjector, merge_patches
from lavis_ds.models.projectors.perceiver import PerceiverProjector
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


# --- pixel shuffle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_merged_patches_have_the_order_of_idefics3_and_internvl(size: int) -> None:
    features = torch.randn(2, 64, 24)
    idefics3 = Idefics3Connector.pixel_shuffle(None, features, size)  # type: ignore[arg-type]
    internvl = InternVLModel.pixel_shuffle(None, features.view(2, 8, 8, 24), 1 / size)  # type: ignore[arg-type]
    merged = merge_patches(features, size)
    torch.testing.assert_close(merged, idefics3, atol=0, rtol=0)
    torch.testing.assert_close(merged, internvl.flatten(1, 2), atol=0, rtol=0)


def test_a_merging_mlp_is_the_connector_of_idefics3_and_the_projector_of_internvl() -> None:
    features = torch.randn(2, 64, 24)
    vision: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4}
    text = {"model_type": "llama", "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}
    idefics3 = Idefics3Connector(Idefics3Config(vision_config=vision, text_config=text, scale_factor=2))
    ours = MLPProjector(MLPProjectorConfig(depth=1, merge_size=2), **SIZES)
    with torch.no_grad():
        ours.layers[0].weight.copy_(idefics3.modality_projection.proj.weight)
        ours.layers[0].bias.zero_()
    assert_same(ours(features), idefics3(features))  # measured 2e-7

    internvl = InternVLMultiModalProjector(InternVLConfig(vision_config=vision, text_config=text))
    ours = MLPProjector(MLPProjectorConfig(merge_size=2, layer_norm=True), **SIZES)
    for theirs, module in (("layer_norm", 0), ("linear_1", 1), ("linear_2", 3)):
        ours.layers[module].load_state_dict(getattr(internvl, theirs).state_dict())
    shuffled = InternVLModel.pixel_shuffle(None, features.view(2, 8, 8, 24), 0.5)  # type: ignore[arg-type]
    assert_same(ours(features), internvl(shuffled.flatten(1, 2)))  # measured 0


def assert_same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


# --- average pool --------------------------------------------------------------------------------------------------


def test_averages_of_neighbours_go_through_the_layers() -> None:
    projector = AveragePoolProjector(AveragePoolProjectorConfig(kernel_size=2), **SIZES)
    features = torch.randn(2, 16, 24)
    first = features.view(2, 4, 4, 24)[:, :2, :2].mean((1, 2))  # the patches 0, 1, 4 and 5
    assert projector.num_tokens(16) == 4
    assert_same(projector(features)[:, 0], projector.layers(first))  # measured 1e-7
    adaptive = AveragePoolProjector(AveragePoolProjectorConfig(grid_size=2), **SIZES)
    adaptive.load_state_dict(projector.state_dict())
    assert_same(adaptive(features), projector(features))  # measured 1e-7
    assert adaptive.num_tokens(25) == 4
    assert adaptive(torch.randn(2, 25, 24)).shape == (2, 4, 40)


# --- perceiver resampler -------------------------------------------------------------------------------------------

PERCEIVER: dict[str, Any] = {
    "num_latents": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def test_perceiver_equals_idefics2() -> None:
    """Features, and gradients of every parameter, are those of transformers' connector with the same weights."""
    projector = PerceiverProjector(PerceiverProjectorConfig(**PERCEIVER), **SIZES)
    config = Idefics2Config(
        vision_config={"hidden_size": 24, "num_attention_heads": 4},
        text_config={"model_type": "llama", "hidden_size": 40, "intermediate_size": 48, "num_attention_heads": 4},
        perceiver_config={
            "resampler_n_latents": 5,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
    )
    connector = Idefics2Connector(config)
    connector.load_state_dict(projector.state_dict(), strict=True)
    features = torch.randn(2, 17, 24)
    made = projector(features)
    expected = connector(features, attention_mask=torch.ones(2, 17, dtype=torch.bool))
    assert_same(made, expected)  # measured 0
    made.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(projector.named_parameters(), connector.parameters(), strict=True):
        assert ours.grad is not None, name
        assert_same(ours.grad, theirs.grad)  # measured 0
    assert projector.num_tokens(17) == 5


def test_latents_of_a_new_perceiver_are_not_alike() -> None:
    """transformers makes them all ones, and equal latents have equal gradients for ever."""
    tokens = PerceiverProjector(PerceiverProjectorConfig(**PERCEIVER), **SIZES)(torch.randn(1, 17, 24))
    assert (tokens[0, 0] - tokens[0, 1]).abs().max() > 1e-3


def test_heads_of_a_perceiver() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads.*divisor of 4"):
        PerceiverProjector(PerceiverProjectorConfig(**(PERCEIVER | {"num_key_value_heads": 3})), **SIZES)


# --- C-Abstractor --------------------------------------------------------------------------------------------------

C_ABSTRACTOR: dict[str, Any] = {"grid_size": 3, "depth": 2, "hidden_size": 32, "num_positions": 25}


def regnet_block(grid: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Figure 2 of RegNet (arXiv 2003.13678) with squeeze and excitation, layer norms over channels, and SiLU."""

    def norm(x: torch.Tensor, conv: str) -> torch.Tensor:
        scale, shift = weights[f"{name}.{conv}.bn.weight"], weights[f"{name}.{conv}.bn.bias"]
        return F.layer_norm(x.movedim(1, -1), scale.shape, scale, shift).movedim(-1, 1)

    x = F.silu(norm(F.conv2d(grid, weights[f"{name}.conv1.conv.weight"]), "conv1"))
    depthwise = weights[f"{name}.conv2.conv.weight"]
    x = F.silu(norm(F.conv2d(x, depthwise, padding=1, groups=len(depthwise)), "conv2"))
    squeezed = x.mean((2, 3), keepdim=True)
    for layer, activation in (("fc1", F.silu), ("fc2", torch.sigmoid)):
        weight, bias = weights[f"{name}.se.{layer}.weight"], weights[f"{name}.se.{layer}.bias"]
        squeezed = activation(F.conv2d(squeezed, weight, bias))
    x = norm(F.conv2d(x * squeezed, weights[f"{name}.conv3.conv.weight"]), "conv3")
    shortcut = weights.get(f"{name}.downsample.conv.weight")
    return F.silu(x + (grid if shortcut is None else norm(F.conv2d(grid, shortcut), "downsample")))


def test_c_abstractor_is_what_the_paper_draws() -> None:
    projector = CAbstractorProjector(CAbstractorProjectorConfig(**C_ABSTRACTOR), **SIZES)
    with torch.no_grad():
        for parameter in projector.parameters():  # norms are made as ones and zeros, under which mistakes could hide
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = dict(projector.named_parameters())
    features = torch.randn(2, 25, 24)
    grid = (features + weights["pos_emb"]).transpose(1, 2).reshape(2, 24, 5, 5)
    grid = regnet_block(regnet_block(grid, weights, "net.0.b1"), weights, "net.0.b2")
    grid = F.adaptive_avg_pool2d(grid, 3)
    grid = regnet_block(regnet_block(grid, weights, "net.2.b1"), weights, "net.2.b2")
    expected = projector.readout(grid.flatten(2).transpose(1, 2))
    assert_same(projector(features), expected)  # measured 5e-7
    assert projector.num_tokens(25) == 9
    with pytest.raises(ConfigError, match="positions for 25 patches, and an image has 16"):
        projector.num_tokens(16)


def test_c_abstractor_gradients() -> None:
    projector = CAbstractorProjector(CAbstractorProjectorConfig(**C_ABSTRACTOR), **SIZES)
    projector(torch.randn(2, 25, 24)).square().sum().backward()
    assert [n for n, p in projector.named_parameters() if p.grad is None] == []


# --- grids ---------------------------------------------------------------------------------------------------------


def make_grid_projectors() -> list[Projector]:
    return [
        AveragePoolProjector(AveragePoolProjectorConfig(grid_size=3), **SIZES),
        CAbstractorProjector(CAbstractorProjectorConfig(**(C_ABSTRACTOR | {"num_positions": None})), **SIZES),
    ]


@pytest.mark.parametrize("num_patches", [17, 12], ids=["class token", "not square"])
def test_what_looks_at_neighbours_needs_a_square(num_patches: int) -> None:
    for projector in make_grid_projectors():
        with pytest.raises(ConfigError, match=rf"{num_patches} tokens an image are no square.*select_tokens"):
            projector.num_tokens(num_patches)


def test_more_tokens_than_patches() -> None:
    for projector in make_grid_projectors():
        with pytest.raises(ConfigError, match=r"grid_size: 2 x 2 patches.*3 x 3"):
            projector.num_tokens(4)
    with pytest.raises(ConfigError, match=r"kernel_size: 3 x 3 patches.*squares of 2 x 2"):
        AveragePoolProjector(AveragePoolProjectorConfig(), **SIZES).num_tokens(9)
    with pytest.raises(ValueError, match="keep one"):
        AveragePoolProjectorConfig(kernel_size=2, grid_size=2)
