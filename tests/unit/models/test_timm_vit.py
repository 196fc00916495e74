from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from lavis_ds.errors import CheckpointError, ConfigError, DataError
from lavis_ds.models.configs import TimmViTConfig
from lavis_ds.models.parts import match_constants
from lavis_ds.models.vision.timm_vit import TimmViT

ARGS = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}


def make(**options: Any) -> TimmViT:
    tree = {"model_name": "vit_tiny_patch16_224", "image_size": 32, "model_args": ARGS, **options}
    return TimmViT(TimmViTConfig.model_validate(tree)).eval()


def reference(encoder: TimmViT, name: str = "vit_tiny_patch16_224", **args: Any) -> Any:
    """timm's own full model; blocks that the encoder does not have keep their random weights."""
    vit = timm.create_model(name, img_size=32, num_classes=0, **(ARGS | args)).eval()
    vit.load_state_dict(encoder.vit.state_dict(), strict=False)
    return vit


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)


def normalised(images: torch.Tensor, vit: Any) -> torch.Tensor:
    mean, std = (torch.tensor(vit.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images.float() / 255 - mean) / std


def test_patch_tokens_equal_timm(images: torch.Tensor) -> None:
    encoder = make()
    vit = reference(encoder)
    expected = vit.forward_features(normalised(images, vit))[:, 1:]
    assert (encoder.num_tokens, encoder.hidden_size) == (16, 32)
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=0)  # measured 0


def test_all_tokens_and_own_layer_norm(images: torch.Tensor) -> None:
    encoder = make(select_tokens="all", layer_norm=True, final_norm=False)
    vit = reference(encoder)
    vit.norm = torch.nn.Identity()
    expected = torch.nn.functional.layer_norm(vit.forward_features(normalised(images, vit)), (32,))
    assert encoder.num_tokens == 17
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=0)  # measured 0


@pytest.mark.parametrize(("layer", "blocks"), [(-2, 2), (0, 1), (2, 3)])
def test_later_blocks_do_not_exist(images: torch.Tensor, layer: int, blocks: int) -> None:
    encoder = make(select_layer=layer, final_norm=False)
    vit = reference(encoder)
    (expected,) = vit.forward_intermediates(
        normalised(images, vit), indices=[blocks - 1], output_fmt="NLC", intermediates_only=True
    )
    assert len(encoder.vit.blocks) == blocks
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=0)  # measured 0


@pytest.mark.parametrize(
    "name", ["eva_giant_patch14_clip_224", "eva_giant_patch14_224", "vit_so400m_patch14_siglip_384"]
)
def test_every_parameter_of_other_families_gets_a_gradient(images: torch.Tensor, name: str) -> None:
    encoder = make(model_name=name)
    encoder(images).square().mean().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None] == []


def test_gradient_checkpointing_changes_nothing(images: torch.Tensor) -> None:
    encoder = make().train()
    recomputing = make(gradient_checkpointing="full").train()
    recomputing.load_state_dict(encoder.state_dict())
    calls: list[int] = []
    recomputing.vit.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for module in (encoder, recomputing):
        module(images).square().sum().backward()
    assert len(calls) == 2
    for (name, p), q in zip(encoder.named_parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-6, msg=name)  # measured 0


def test_a_cast_leaves_statistics_in_float32(images: torch.Tensor) -> None:
    encoder = make().bfloat16()
    assert encoder.pixels.mean.dtype == torch.float32
    torch.testing.assert_close(encoder.pixels(images), make().pixels(images), atol=0, rtol=0)
    assert encoder(images).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 64, 64, dtype=torch.uint8)])
def test_other_pixels_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"uint8 of shape \(N, 3, 32, 32\)"):
        make()(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "vit_tiny_patch16_242"}, "vit_tiny_patch16_224"),
        ({"model_name": "resnet18", "model_args": {}}, "no Vision Transformer|can't build"),
        ({"model_args": {"depht": 2}}, "depht"),
        ({"select_layer": 3}, "-3 to 2"),
        ({"model_name": "vit_tiny_patch16_224.nothing"}, "nothing"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_weights_file_is_loaded_strictly(tmp_path: Path, images: torch.Tensor) -> None:
    encoder = make()
    file = tmp_path / "vit.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", img_size=32, **ARGS).state_dict(), file)  # with its classifier
    loaded = make(weights=str(file), select_layer=-2)
    assert loaded.sourced == ("vit",)
    save_file(encoder.vit.state_dict(), file)
    torch.testing.assert_close(make(weights=str(file))(images), encoder(images), atol=0, rtol=0)
    state = encoder.vit.state_dict()
    state.pop("norm.weight")
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: norm\.weight"):
        make(weights=str(file))
    save_file({**encoder.vit.state_dict(), "other": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="unknown 1 tensors: other"):
        make(weights=str(file))
    file.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="file of weights is damaged"):
        make(weights=str(file))


def test_pretrained_without_internet_says_so() -> None:
    with pytest.raises(CheckpointError, match="Without internet"):
        make(pretrained=True)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "eva_giant_patch14_clip_224",
        "eva02_tiny_patch14_224",
        "vit_base_patch16_siglip_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_rope_224",
        "beit_base_patch16_224",
    ],
)
def test_families_run_in_bf16(images: torch.Tensor, name: str) -> None:
    """Constants keep their type where that is needed, and only there; measured errors are 0.006 to 0.04."""
    encoder = make(model_name=name).train(False)
    expected = encoder(images)
    features = encoder.to(torch.bfloat16)(images)
    assert features.dtype == torch.bfloat16
    error = (features.float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.1


def test_an_engine_that_casts_parameters_alone_can_run_eva(images: torch.Tensor) -> None:
    encoder = make(model_name="eva_giant_patch14_clip_224")
    for parameter in encoder.parameters():
        parameter.data = parameter.data.bfloat16()
    match_constants(encoder)
    assert encoder(images).dtype == torch.bfloat16
    assert encoder.pixels.mean.dtype == torch.float32


@pytest.mark.parametrize("size", [30, 7])
def test_image_sizes_that_cut_a_patch(size: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.vision\.image_size: .*multiple of the patch size.*a multiple of 8"):
        make(image_size=size)
