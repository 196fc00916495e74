from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lavis_ds.errors import CheckpointError, ConfigError
from tests.unit.runners.export.conftest import EVA, QFORMER, Tree

Exported = Callable[..., Any]
VIT: Tree = {**EVA, "model_name": "vit_tiny_patch16_224"}


@pytest.fixture
def mini(tree: Tree) -> Tree:
    """The project with EVA's blocks and a Q-Former."""
    tree["model"] |= {"arch": "minigpt4qwen", "vision": EVA, "projector": QFORMER}
    return tree


def large_features(model: Any) -> None:
    """As a trained ViT-g has them: the eps of the layer norm behind it does not show."""
    model.vision.vit.pos_embed.mul_(50)


def test_eva_and_q_former(mini: Tree, exported: Exported) -> None:
    folder, agreements = exported(mini, edit=large_features)
    assert [a.logits < 2e-6 for a in agreements] == [True, True]  # measured 4.2e-7, 2.4e-7
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Blip2ForConditionalGeneration"]
    assert config["vision_config"]["num_hidden_layers"] == 2
    assert config["num_query_tokens"] == 4
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    query, key, value = model.vision_model.encoder.layers[1].self_attn.qkv.bias.chunk(3)
    assert key.abs().max() == 0
    assert min(query.abs().max(), value.abs().max()) > 0


@pytest.mark.parametrize("norm", ["final_norm", "layer_norm"])
def test_a_plain_vit(mini: Tree, exported: Exported, norm: str) -> None:
    mini["model"]["vision"] = {**VIT, "final_norm": False, "layer_norm": False, norm: True}
    _, agreements = exported(mini, edit=large_features)
    assert max(a.logits for a in agreements) < 2e-6  # measured 3.6e-7


def test_the_eps_behind_the_tower_is_named_where_it_shows(mini: Tree, exported: Exported) -> None:
    def small_features(model: Any) -> None:
        for parameter in model.vision.vit.parameters():
            parameter.mul_(0.01)

    with pytest.raises(CheckpointError, match=r"has eps 1e-05 here, and that of the blocks, 1e-06"):
        exported(mini, edit=small_features)


def test_tied_embeddings(mini: Tree, exported: Exported) -> None:
    mini["model"]["language"]["config"]["tie_word_embeddings"] = True
    folder, agreements = exported(mini, edit=large_features)
    assert max(a.logits for a in agreements) < 2e-6  # measured 4e-7
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_user_can_generate(mini: Tree, exported: Exported) -> None:
    folder, _ = exported(mini, edit=large_features)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(images=Image.new("RGB", (60, 40), "red"), text=text, return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_index).sum() == 4
    answers = [model.generate(**inputs, max_new_tokens=5, min_new_tokens=5) for _ in range(2)]
    torch.testing.assert_close(*answers, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({**EVA, "select_tokens": "patch"}, "sees the class token"),
        ({**EVA, "layer_norm": False}, "ends with one layer norm"),
        ({**EVA, "final_norm": True}, "ends with one layer norm"),
        ({**EVA, "model_name": "eva02_tiny_patch14_224"}, "rotary|has no "),
        ({**EVA, "model_name": "vit_small_patch14_reg4_dinov2"}, "one token before the patches"),
        ({**EVA, "model_name": "vit_small_patch14_dinov2"}, r"has no blocks\.0\.ls1"),
        ({**EVA, "model_name": "vit_base_patch16_siglip_224"}, "one token before the patches"),
        ({**EVA, "model_name": "vit_base_patch16_clip_quickgelu_224"}, "GELU"),
    ],
)
def test_what_it_has_no_place_for(mini: Tree, exported: Exported, vision: Tree, message: str) -> None:
    mini["model"]["vision"] = vision
    with pytest.raises(ConfigError, match=message):
        exported(mini)
