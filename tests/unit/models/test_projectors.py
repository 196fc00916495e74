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
    LlavaConfig,
)
from transformers.models.idefics2.modeling_idefics2 import Idefics2Connector
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

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
from tests.parity import Parity, gradient_error, input_gradients, relative_error

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


def test_qformer_equals_blip2(parity: Parity) -> None:
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
    mask = torch.ones(features.shape[:2])
    hidden = blip2.qformer(query_embeds=queries, encoder_hidden_states=features, encoder_attention_mask=mask)
    expected, made = blip2.language_projection(hidden.last_hidden_state), projector(features)
    theirs = {k.replace("language_projection", "linear"): g for k, g in input_gradients(expected, blip2).items()}
    parity(
        "projector qformer",
        "`Blip2ForConditionalGeneration`",
        forward=relative_error(made, expected),
        gradient=gradient_error(input_gradients(made, projector), theirs),
    )
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


PROJECTORS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Idefics3Connector": ({"depth": 1, "merge_size": 2}, {"layers.0": "modality_projection.proj"}),
    "InternVLMultiModalProjector": (
        {"merge_size": 2, "layer_norm": True},
        {"layers.0": "layer_norm", "layers.1": "linear_1", "layers.3": "linear_2"},
    ),
    "LlavaMultiModalProjector": ({}, {"layers.0": "linear_1", "layers.2": "linear_2"}),
}
"""Options of ours, and our names of the reference's modules."""


def make_reference(name: str) -> nn.Module:
    vision: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4}
    text: dict[str, Any] = {"model_type": "llama", "hidden_size": 40, "num_attention_heads": 4}
    if name == "Idefics3Connector":
        return Idefics3Connector(Idefics3Config(vision_config=vision, text_config=text, scale_factor=2))
    if name == "InternVLMultiModalProjector":
        return InternVLMultiModalProjector(InternVLConfig(vision_config=vision, text_config=text))
    return LlavaMultiModalProjector(
        LlavaConfig(vision_config={"model_type": "clip_vision_model", **vision}, text_config=text)
    )


@pytest.mark.parametrize("name", list(PROJECTORS))
def test_mlp_equals_transformers(parity: Parity, name: str) -> None:
    options, names = PROJECTORS[name]
    reference = make_reference(name)
    ours = MLPProjector(MLPProjectorConfig(**options), **SIZES)
    with torch.no_grad():
        for mine, theirs in names.items():
            for key, parameter in ours.get_submodule(mine).named_parameters():
                source = getattr(reference.get_submodule(theirs), key)
                parameter.copy_(torch.zeros_like(parameter) if source is None else source)
    features = torch.randn(2, 64, 24)
    is_internvl = name.startswith("InternVL")  # which shuffles outside the projector
    grid = features.view(2, 8, 8, 24)
    given = InternVLModel.pixel_shuffle(None, grid, 0.5).flatten(1, 2) if is_internvl else features  # type: ignore[arg-type]
    made, expected = ours(features), reference(given)
    mine = input_gradients(made, ours)
    renamed = {f"{names[k.rpartition('.')[0]]}.{k.rpartition('.')[2]}": g for k, g in mine.items()}
    theirs = input_gradients(expected, reference)
    parity(
        f"projector mlp, {options or 'as LLaVA'}".replace("'", ""),
        f"`{name}`",
        forward=relative_error(made, expected),
        gradient=gradient_error({k: g for k, g in renamed.items() if k in theirs}, theirs),  # Idefics3's has no bias
    )


def assert_same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


# --- average pool --------------------------------------------------------------------------------------------------


def test_averages_of_neighbours_go_through_the_layers(parity: Parity) -> None:
    projector = AveragePoolProjector(AveragePoolProjectorConfig(kernel_size=2), **SIZES)
    features = torch.randn(2, 16, 24)
    first = features.view(2, 4, 4, 24)[:, :2, :2].mean((1, 2))  # the patches 0, 1, 4 and 5
    assert projector.num_tokens(16) == 4
    made, expected = projector(features)[:, 0], projector.layers(first)
    parity(
        "projector average_pool",
        "`mean`, in the test",
        forward=relative_error(made, expected),
        gradient=gradient_error(input_gradients(made, projector), input_gradients(expected, projector)),
    )
    adaptive = AveragePoolProjector(AveragePoolProjectorConfig(grid_size=2), **SIZES)
    adaptive.load_state_dict(projector.state_dict())
    assert_same(adaptive(features), projector(features))
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


def test_perceiver_equals_idefics2(parity: Parity) -> None:
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
    parity(
        "projector perceiver",
        "`Idefics2Connector`",
        forward=relative_error(made, expected),
        gradient=gradient_error(input_gradients(made, projector), input_gradients(expected, connector)),
    )
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


def test_c_abstractor_is_what_the_paper_draws(parity: Parity) -> None:
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
    made = projector(features)
    own, theirs = input_gradients(made, projector), input_gradients(expected, projector)
    parity(
        "projector c_abstractor",
        "formulas of RegNet and Honeybee, in the test",
        forward=relative_error(made, expected),
        gradient=gradient_error(own, theirs),
    )
    assert projector.num_tokens(25) == 9
    with pytest.raises(ConfigError, match="positions for 25 patches, and an image has 16"):
        projector.num_tokens(16)


@pytest.mark.parametrize("name", ["perceiver", "c_abstractor", "average_pool", "mlp"])
def test_projectors_run_in_bf16(name: str) -> None:
    projector = {
        "perceiver": lambda: PerceiverProjector(PerceiverProjectorConfig(**PERCEIVER), **SIZES),
        "c_abstractor": lambda: CAbstractorProjector(CAbstractorProjectorConfig(**C_ABSTRACTOR), **SIZES),
        "average_pool": lambda: AveragePoolProjector(AveragePoolProjectorConfig(grid_size=3), **SIZES),
        "mlp": lambda: MLPProjector(MLPProjectorConfig(merge_size=5, layer_norm=True), **SIZES),
    }[name]()
    features = torch.randn(2, 25, 24)
    expected = projector(features)
    tokens = projector.to(torch.bfloat16)(features.bfloat16())
    error = (tokens.float() - expected).abs().mean() / expected.abs().mean()
    assert tokens.dtype == torch.bfloat16
    assert error < 0.05, error  # measured 0.003 to 0.012


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
