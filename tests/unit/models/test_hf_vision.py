from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
)

from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.models.configs import HFVisionConfig
from lavis_ds.models.vision.hf_vision import HFVision

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
DINO = {k: v for k, v in SHAPE.items() if k != "intermediate_size"}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def make(**options: Any) -> HFVision:
    return HFVision(HFVisionConfig.model_validate(options)).eval()


def save_whole(family: str, folder: Path) -> Any:
    """A folder as on the hub; returns the reference tower."""
    torch.manual_seed(1)
    whole: Any
    if family == "clip":
        whole = CLIPModel(CLIPConfig(vision_config=SHAPE, text_config=TEXT))
    elif family == "siglip":
        whole = SiglipModel(SiglipConfig(vision_config=SHAPE, text_config=TEXT))
    else:
        whole = Dinov2Model(Dinov2Config(**DINO))
    whole.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return (whole if family == "dinov2" else whole.vision_model).eval()


def pixels(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
    return images, (images.float() / 255 - mean) / std


@pytest.mark.parametrize("layer", [-1, -2, 1])
@pytest.mark.parametrize(("family", "prefix"), [("clip", 1), ("siglip", 0), ("dinov2", 1)])
def test_hidden_states_equal_transformers(tmp_path: Path, family: str, prefix: int, layer: int) -> None:
    tower = save_whole(family, tmp_path)
    images, normalised = pixels()
    expected = tower(pixel_values=normalised, output_hidden_states=True).hidden_states[layer][:, prefix:]
    encoder = make(path=str(tmp_path), select_layer=layer)
    assert (encoder.num_tokens, encoder.hidden_size, encoder.image_size) == (16, 32, 32)
    assert encoder.tower.config.num_hidden_layers == layer % 4
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=1e-6)  # measured 0
    assert make(path=str(tmp_path), select_tokens="all").num_tokens == 16 + prefix


def test_final_norm(tmp_path: Path) -> None:
    tower = save_whole("dinov2", tmp_path)
    images, normalised = pixels()
    encoder = make(path=str(tmp_path), final_norm=True)
    expected = tower(pixel_values=normalised).last_hidden_state[:, 1:]
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=1e-6)  # measured 0


@pytest.mark.parametrize(("family", "prefix"), [("clip", 1), ("siglip", 0), ("dinov2", 1)])
def test_another_image_size_interpolates_positions(tmp_path: Path, family: str, prefix: int) -> None:
    tower = save_whole(family, tmp_path)
    images, normalised = pixels(48)
    options = {} if family == "dinov2" else {"interpolate_pos_encoding": True}
    expected = tower(pixel_values=normalised, output_hidden_states=True, **options).hidden_states[-1][:, prefix:]
    encoder = make(path=str(tmp_path), image_size=48)
    assert encoder.num_tokens == 36
    torch.testing.assert_close(encoder(images), expected, atol=1e-6, rtol=1e-6)  # measured 0


@pytest.mark.parametrize(
    ("shape", "prefix"),
    [
        ({"model_type": "clip_vision_model", **SHAPE}, 1),
        ({"model_type": "siglip_vision_model", **SHAPE}, 0),
        ({"model_type": "dinov2", **DINO}, 1),
        ({"model_type": "dinov2_with_registers", **DINO, "num_register_tokens": 4}, 5),
        ({"model_type": "dinov3_vit", **SHAPE, "num_register_tokens": 4}, 5),
        ({"model_type": "vit", **SHAPE}, 1),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_every_parameter_gets_a_gradient(shape: dict[str, Any], prefix: int) -> None:
    encoder = make(config=shape, select_tokens="all", gradient_checkpointing=True).train()
    features = encoder(pixels()[0])
    assert features.shape == (2, 16 + prefix, 32)
    assert encoder.num_tokens == 16 + prefix
    features.square().mean().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "/nowhere/at/all"}, CheckpointError, "no such folder"),
        ({"path": "nobody/nothing"}, CheckpointError, "Without internet"),
        ({"config": {"model_type": "clip_vision_modle"}}, ConfigError, "clip_vision_model"),
        ({"config": {"model_type": "clip_vision_model", **SHAPE, "patch_sise": 4}}, ConfigError, "patch_size"),
        ({"config": {"model_type": "qwen3"}}, ConfigError, "patch_size, image_size"),
        ({"config": {"model_type": "clip_vision_model", **SHAPE}, "select_layer": 4}, ConfigError, "-4 to 3"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_image_sizes_and_patches(tmp_path: Path) -> None:
    """SigLIP so400m's own 384 px are no multiple of its 14 px patches; another size must be one."""
    assert make(config={"model_type": "siglip_vision_model", **SHAPE, "image_size": 30}).num_tokens == 9
    save_whole("siglip", tmp_path)
    with pytest.raises(ConfigError, match="multiple of 8"):
        make(path=str(tmp_path), image_size=30)


def test_folder_without_weights_or_with_others(tmp_path: Path) -> None:
    Dinov2Config(**DINO).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="can't be loaded"):
        make(path=str(tmp_path))
    AutoModel.from_config(ViTConfig(**SHAPE)).save_pretrained(tmp_path)
    Dinov2Config(**DINO).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"do not fit a Dinov2Model\. They lack \d+ tensors"):
        make(path=str(tmp_path))
