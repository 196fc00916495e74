"""Vision encoders have the features and gradients of transformers' and timm's own models with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lavis_ds.models.configs import HFVisionConfig, TimmViTConfig
from lavis_ds.models.vision.hf_vision import HFVision
from lavis_ds.models.vision.timm_vit import TimmViT
from tests.parity import Parity, gradient_error, input_gradients, relative_error

PLAIN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
WIDE = {**PLAIN, "intermediate_size": 64}
CLIP_STATISTICS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TOWERS: dict[str, tuple[dict[str, Any], int, Any]] = {
    "CLIP": ({"model_type": "clip_vision_model", **WIDE}, 1, CLIP_STATISTICS),
    "SigLIP, SigLIP 2": ({"model_type": "siglip_vision_model", **WIDE}, 0, HALF),
    "DINOv2": ({"model_type": "dinov2", **PLAIN}, 1, IMAGENET),
    "DINOv2 with registers": ({"model_type": "dinov2_with_registers", **PLAIN, "num_register_tokens": 4}, 5, IMAGENET),
    "DINOv3": ({"model_type": "dinov3_vit", **WIDE, "num_register_tokens": 4}, 5, IMAGENET),
    "ViT": ({"model_type": "vit", **WIDE}, 1, HALF),
}
"""Shape, tokens before the patches, and mean and std of pretraining. SigLIP 2 of a fixed size is of SigLIP's class."""

TIMM = [
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "eva_giant_patch14_clip_224",
    "eva02_tiny_patch14_224",
    "vit_base_patch16_siglip_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_rope_224",
    "beit_base_patch16_224",
]


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)


def normalised(images: Tensor, mean: Any, std: Any) -> Tensor:
    return (images.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def randomise(model: nn.Module) -> None:
    """Norms and biases are made as ones and zeros, under which mistakes could hide."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("tokens", ["patch", "all"])
@pytest.mark.parametrize(("layer", "norm"), [(-1, False), (-2, False), (0, False), (-1, True)])
@pytest.mark.parametrize("family", list(TOWERS))
def test_towers_of_transformers(
    parity: Parity, images: Tensor, family: str, layer: int, norm: bool, tokens: str
) -> None:
    shape, num_prefix, statistics = TOWERS[family]
    options = {"config": shape, "select_layer": layer, "final_norm": norm, "select_tokens": tokens}
    encoder = HFVision(HFVisionConfig.model_validate(options)).eval()
    kind = dict(shape)
    reference: Any = AutoModel.from_config(AutoConfig.for_model(kind.pop("model_type"), **kind)).eval()
    randomise(reference)
    norm_name = next(n for n in ("post_layernorm", "layernorm", "norm") if hasattr(reference, n))
    names = {
        f"{part}.{name}": name if part == "tower" else f"{norm_name}.{name}"
        for part in ("tower", "norm")
        for name, _ in getattr(encoder, part).named_parameters()
    }
    weights = dict(reference.named_parameters())
    encoder.load_state_dict({ours: weights[theirs].detach() for ours, theirs in names.items()}, strict=False)

    features = encoder(images)
    output = reference(pixel_values=normalised(images, *statistics), output_hidden_states=True)
    hidden = getattr(reference, norm_name)(output.hidden_states[layer]) if norm else output.hidden_states[layer]
    expected = hidden[:, num_prefix if tokens == "patch" else 0 :]

    ours = {names[name]: gradient for name, gradient in input_gradients(features, encoder).items()}
    assert len(ours) == len(names)
    parity(
        f"hf_vision: {family}",
        f"`{type(reference).__name__}`",
        forward=relative_error(features, expected),
        gradient=gradient_error(ours, input_gradients(expected, reference)),
    )


@pytest.mark.parametrize("tokens", ["patch", "all"])
@pytest.mark.parametrize(("layer", "norm"), [(-1, True), (-2, False), (0, False)])
@pytest.mark.parametrize("name", TIMM)
def test_towers_of_timm(parity: Parity, images: Tensor, name: str, layer: int, norm: bool, tokens: str) -> None:
    args = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
    options = {"model_name": name, "image_size": 32, "model_args": args}
    chosen = {"select_layer": layer, "final_norm": norm, "select_tokens": tokens}
    encoder = TimmViT(TimmViTConfig.model_validate(options | chosen)).eval()
    reference: Any = timm.create_model(name, img_size=32, num_classes=0, **args).eval()
    if isinstance(reference.norm, nn.Identity):  # those that average have their norm behind the average
        reference.norm = reference.fc_norm
        reference.fc_norm = nn.Identity()
    randomise(reference)
    weights = reference.state_dict()
    encoder.vit.load_state_dict({key: weights[key] for key in encoder.vit.state_dict()})

    features = encoder(images)
    statistics = reference.pretrained_cfg["mean"], reference.pretrained_cfg["std"]
    (found,) = reference.forward_intermediates(
        normalised(images, *statistics),
        indices=[layer % 3],
        return_prefix_tokens=True,
        norm=norm,
        output_fmt="NLC",
        intermediates_only=True,
    )
    patches, *prefix = found if isinstance(found, tuple) else (found,)  # one tensor where nothing is before the patches
    expected = patches if tokens == "patch" else torch.cat([*prefix, patches], dim=1)

    ours = {key.removeprefix("vit."): g for key, g in input_gradients(features, encoder).items()}
    assert len(ours) == len(list(encoder.parameters()))
    parity(
        "timm_vit: any model by name",
        f"`timm.create_model`, {len(TIMM)} kinds",
        forward=relative_error(features, expected),
        gradient=gradient_error(ours, input_gradients(expected, reference)),
    )
