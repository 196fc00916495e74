"""Files of LAVIS and MiniGPT4Qwen: features equal a plain re-statement of LAVIS's modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu, interpolate, layer_norm, linear

from lavis_ds.errors import CheckpointError
from lavis_ds.models.configs import QFormerProjectorConfig, TimmViTConfig
from lavis_ds.models.conversion import lavis
from lavis_ds.models.conversion.stored import Stored
from lavis_ds.models.minigpt4qwen import MiniGPT4Qwen
from lavis_ds.models.projectors.qformer import QFormerProjector
from lavis_ds.models.skeleton import without_weights
from lavis_ds.models.vision.timm_vit import TimmViT
from tests.unit.models.conversion import conftest as layouts
from tests.unit.models.conversion.conftest import (
    DEPTH,
    HEADS,
    Q_LAYERS,
    WIDTH,
    Tensors,
    eva_tensors,
    projection_tensors,
    qformer_tensors,
    qwen_tensors,
    without_text,
)

Make = Callable[..., MiniGPT4Qwen]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def eva(w: Tensors, images: Tensor) -> Tensor:
    """`VisionTransformer.forward` of `lavis/models/eva_vit.py`, after LAVIS's normalisation of pixels."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = (images.float() / 255 - mean) / std
    x = conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=14).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + w["pos_embed"]
    size = WIDTH // HEADS
    for n in range(DEPTH):
        b = f"blocks.{n}."
        bias = torch.cat([w[b + "attn.q_bias"], torch.zeros(WIDTH), w[b + "attn.v_bias"]])
        y = layer_norm(x, (WIDTH,), w[b + "norm1.weight"], w[b + "norm1.bias"], 1e-6)
        q, k, v = linear(y, w[b + "attn.qkv.weight"], bias).unflatten(-1, (3, HEADS, size)).unbind(2)
        attention = (torch.einsum("nqhd,nkhd->nhqk", q, k) / size**0.5).softmax(-1)
        y = torch.einsum("nhqk,nkhd->nqhd", attention, v).flatten(2)
        x = x + linear(y, w[b + "attn.proj.weight"], w[b + "attn.proj.bias"])
        y = layer_norm(x, (WIDTH,), w[b + "norm2.weight"], w[b + "norm2.bias"], 1e-6)
        y = gelu(linear(y, w[b + "mlp.fc1.weight"], w[b + "mlp.fc1.bias"]))
        x = x + linear(y, w[b + "mlp.fc2.weight"], w[b + "mlp.fc2.bias"])
    return x


def qformer(w: Tensors, features: Tensor) -> Tensor:
    """`ln_vision`, then `Qformer.bert` with queries alone: what `encode_image` of MiniGPT4Qwen projects."""

    def dense(name: str, x: Tensor) -> Tensor:
        return linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(name: str, x: Tensor, eps: float = 1e-12) -> Tensor:
        return layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)

    def attend(name: str, x: Tensor, others: Tensor) -> Tensor:
        q, k, v = (
            dense(f"{name}.self.{part}", source).unflatten(-1, (3, -1))
            for part, source in (("query", x), ("key", others), ("value", others))
        )
        attention = (torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("nhqk,nkhd->nqhd", attention, v).flatten(2)
        return norm(f"{name}.output.LayerNorm", dense(f"{name}.output.dense", y) + x)

    features = norm("ln_vision", features, 1e-5)
    x = norm("Qformer.bert.embeddings.LayerNorm", w["query_tokens"].expand(len(features), -1, -1))
    for n in range(Q_LAYERS):
        layer = f"Qformer.bert.encoder.layer.{n}"
        x = attend(f"{layer}.attention", x, x)
        if n % 2 == 0:
            x = attend(f"{layer}.crossattention", x, features)
        y = gelu(dense(f"{layer}.intermediate_query.dense", x))
        x = norm(f"{layer}.output_query.LayerNorm", dense(f"{layer}.output_query.dense", y) + x)
    return x


def project(w: Tensors, queries: Tensor) -> Tensor:
    return linear(queries, w["llm_proj.weight"], w["llm_proj.bias"])


def encoded(model: MiniGPT4Qwen, images: Tensor) -> Tensor:
    """The Q-Former's output, before our linear layer."""
    found: list[Tensor] = []
    handle = model.projector.linear.register_forward_pre_hook(lambda module, args: found.append(args[0]))  # type: ignore[union-attr]
    model.encode_images(images)
    handle.remove()
    return found[0]


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8)


@pytest.fixture
def eva_file(tmp_path: Path) -> str:
    """eva_vit_g.pth: bare names, the block that LAVIS leaves out, the tower's own norm and head."""
    rest = {"norm.weight": torch.ones(WIDTH), "norm.bias": torch.zeros(WIDTH), "head.weight": torch.ones(8, WIDTH)}
    torch.save(eva_tensors(DEPTH + 1) | rest, tmp_path / "eva_vit_g.pth")
    return str(tmp_path / "eva_vit_g.pth")


@pytest.fixture
def blip2_file(tmp_path: Path) -> str:
    """blip2_pretrained_flant5xxl.pth, the text half left in."""
    tensors = qformer_tensors() | projection_tensors("t5_proj", 64)
    torch.save({"model": tensors}, tmp_path / "blip2.pth")
    return str(tmp_path / "blip2.pth")


def test_tower_and_qformer_of_blip2(make: Make, images: Tensor, eva_file: str, blip2_file: str) -> None:
    model = make(vision={"weights": eva_file}, pretrained=blip2_file)
    expected = qformer(qformer_tensors(), eva(eva_tensors(), images))
    torch.testing.assert_close(encoded(model, images), expected, atol=1e-5, rtol=0)  # measured 6e-7
    notices = "\n".join(model.notices)
    assert "2 of the projection to another language model (t5_proj.bias, t5_proj.weight)" in notices
    assert "of the Q-Former's text half (Qformer.bert.embeddings.position_embeddings.weight" in notices
    assert "RANDOM WEIGHTS: projector.linear (" in notices


def test_tower_in_the_same_file_and_the_cut_qformer(make: Make, images: Tensor, tmp_path: Path) -> None:
    whole = eva_tensors(prefix="visual_encoder.") | without_text(qformer_tensors()) | projection_tensors("opt_proj", 7)
    heads = {"temp": torch.ones(()), **projection_tensors("vision_proj", 3), **projection_tensors("itm_head", 2)}
    language = {f"llm_model.{k}": v for k, v in make().language.lm.state_dict().items()}
    path = tmp_path / "checkpoint_3"  # recognised by content
    torch.save({"model": whole | heads | language, "epoch": 3, "config": {"run": {"seed": 42}}}, path)
    model = make(pretrained=str(path))
    expected = qformer(qformer_tensors(), eva(eva_tensors(), images))
    torch.testing.assert_close(encoded(model, images), expected, atol=1e-5, rtol=0)  # measured 6e-7
    assert any("5 of heads of pretraining" in line for line in model.notices)
    for name, tensor in model.language.lm.state_dict().items():
        assert torch.equal(tensor, language[f"llm_model.{name}"])


def test_projection_over_blip2(make: Make, images: Tensor, eva_file: str, blip2_file: str, tmp_path: Path) -> None:
    """What MiniGPT4Qwen publishes: a file with llm_proj alone."""
    torch.save(projection_tensors(), tmp_path / "model.pth")
    model = make(vision={"weights": eva_file}, pretrained=blip2_file, finetuned=str(tmp_path / "model.pth"))
    expected = project(projection_tensors(), qformer(qformer_tensors(), eva(eva_tensors(), images)))
    torch.testing.assert_close(model.encode_images(images), expected, atol=1e-5, rtol=0)  # measured 6e-7
    assert not any("projector.linear" in line for line in model.notices)


def test_everything_with_the_original_qwen(make: Make, images: Tensor, tmp_path: Path) -> None:
    w = eva_tensors(prefix="visual_encoder.") | without_text(qformer_tensors()) | projection_tensors() | qwen_tensors()
    w["llm_model.transformer.rotary_emb.inv_freq"] = torch.ones(4)
    w["llm_model.transformer.h.0.attn.masked_bias"] = torch.ones(1)
    torch.save({f"module.{k}": v for k, v in w.items()}, tmp_path / "all.pth")  # from DistributedDataParallel
    model = make(pretrained=str(tmp_path / "all.pth"))
    expected = project(w, qformer(w, eva(eva_tensors(), images)))
    torch.testing.assert_close(model.encode_images(images), expected, atol=1e-5, rtol=0)  # measured 6e-7
    own = model.language.lm.state_dict()
    fused = w["llm_model.transformer.h.1.attn.c_attn.weight"]
    assert torch.equal(torch.cat([own[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]), fused)
    assert torch.equal(own["model.layers.0.mlp.gate_proj.weight"], w["llm_model.transformer.h.0.mlp.w2.weight"])
    assert not any("RANDOM" in line for line in model.notices)


def test_instructblip_s_projection_is_left_out(make: Make, eva_file: str, tmp_path: Path) -> None:
    """Its `llm_proj` goes to Vicuna. Only its Q-Former reads text."""
    torch.save({"model": qformer_tensors() | projection_tensors()}, tmp_path / "instructblip.pth")
    model = make(vision={"weights": eva_file}, pretrained=str(tmp_path / "instructblip.pth"))
    assert any("2 of the projection to another language model" in line for line in model.notices)
    assert not torch.equal(model.projector.linear.weight, projection_tensors()["llm_proj.weight"])


def test_positions_of_the_tower_are_resized_as_in_lavis(make: Make, eva_file: str) -> None:
    model = make(image_size=56, vision={"weights": eva_file})
    positions = eva_tensors()["pos_embed"]
    grid = positions[:, 1:].reshape(1, 2, 2, WIDTH).permute(0, 3, 1, 2)
    resized = interpolate(grid, size=(4, 4), mode="bicubic", align_corners=False).permute(0, 2, 3, 1).flatten(1, 2)
    expected = torch.cat([positions[:, :1], resized], 1)
    torch.testing.assert_close(model.vision.vit.pos_embed, expected, atol=1e-6, rtol=0)  # measured 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ({"query_tokens": torch.ones(1, 9, 24)}, r"projector\.query_tokens is \(1, 9, 24\) in the file"),
        ({"Qformer.bert.encoder.layer.9.output_query.dense.bias": torch.ones(2)}, r"the model's: projector\.qformer"),
        ({"llm_proj.lora_A": torch.ones(2)}, r"not the model's: projector\.linear\.lora_A"),
        ({"stranger": torch.ones(2)}, r"not the model's: stranger"),
    ],
)
def test_what_nothing_explains_is_refused(make: Make, eva_file: str, tmp_path: Path, spoil: Tensors, text: str) -> None:
    torch.save({"model": without_text(qformer_tensors()) | spoil}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=text):
        make(vision={"weights": eva_file}, pretrained=str(tmp_path / "x.pth"))


def test_a_blip2_file_without_its_tower_says_where_that_is(make: Make, blip2_file: str) -> None:
    with pytest.raises(CheckpointError, match=r"not in the files: .*eva_vit_g\.pth in model\.vision\.weights"):
        make(pretrained=blip2_file)


def test_a_tower_alone_belongs_into_vision_weights(make: Make, eva_file: str) -> None:
    with pytest.raises(CheckpointError, match=r"name it in model\.vision\.weights"):
        make(pretrained=eva_file)


def test_weights_of_some_parts_belong_into_finetuned(make: Make, eva_file: str, tmp_path: Path) -> None:
    torch.save(projection_tensors(), tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"projector\.q.*belong into model\.finetuned"):
        make(vision={"weights": eva_file}, pretrained=str(tmp_path / "model.pth"))


def test_finetuned_that_trains_nothing_is_refused(make: Make, eva_file: str, blip2_file: str, tmp_path: Path) -> None:
    torch.save(projection_tensors(), tmp_path / "model.pth")
    options: dict[str, Any] = {"vision": {"weights": eva_file}, "finetuned": str(tmp_path / "model.pth")}
    with pytest.raises(CheckpointError, match=r"model\.finetuned: none of these tensors is one that trains.*projector"):
        make(**options, pretrained=blip2_file, freeze=["projector.linear"])
    make(**options, pretrained=blip2_file, freeze=["vision", "language"])


def test_frozen_and_random_is_said_loudly(make: Make, eva_file: str, tmp_path: Path) -> None:
    torch.save(projection_tensors(), tmp_path / "model.pth")
    model = make(
        vision={"weights": eva_file}, finetuned=str(tmp_path / "model.pth"), freeze=["projector.qformer", "vision"]
    )
    assert any("FROZEN WITH RANDOM WEIGHTS: projector.qformer, vision.layer_norm." in line for line in model.notices)


def test_names_and_shapes_at_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLIP-2's ViT-g (39 blocks) and Q-Former in the parts of configs/models/minigpt4qwen; nothing but shapes."""
    sizes = {"WIDTH": 1408, "HEADS": 16, "MLP": 6144, "QUERIES": 32, "Q_WIDTH": 768, "Q_LAYERS": 12, "Q_MLP": 3072}
    for name, size in sizes.items():
        monkeypatch.setattr(layouts, name, size)
    monkeypatch.setattr(layouts.Random, "__call__", lambda self, *shape: torch.empty(shape, device="meta"))
    tower = layouts.eva_tensors(39, "visual_encoder.", image_size=224)
    found = lavis.convert({name: Stored(tensor) for name, tensor in (tower | layouts.qformer_tensors()).items()})
    options = {"select_layer": -2, "final_norm": False, "layer_norm": True, "select_tokens": "all"}
    with without_weights():
        vision = TimmViT(TimmViTConfig.model_validate({"model_name": "eva_giant_patch14_clip_224", **options}))
        projector = QFormerProjector(QFormerProjectorConfig(), vision_hidden_size=1408, language_hidden_size=4096)
    own = {f"vision.{name}": tuple(tensor.shape) for name, tensor in vision.state_dict().items()}
    own |= {f"projector.{name}": tuple(tensor.shape) for name, tensor in projector.state_dict().items()}
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: shape for name, shape in own.items() if not name.startswith("projector.linear.")
    }
