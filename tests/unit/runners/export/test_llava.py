from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from lavis_ds.errors import ConfigError
from tests.unit.runners.export.conftest import CLIP, SIGLIP, SIZES, Tree

PLAIN = {key: SIZES[key] for key in SIZES if key != "intermediate_size"} | {"image_size": 32, "patch_size": 8}
Exported = Callable[..., Any]


def keys(folder: Any) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_clip(tree: Tree, exported: Exported) -> None:
    folder, agreements = exported(tree)
    assert [a.logits < 2e-6 for a in agreements] == [True, True]  # measured 3.0e-7, 1.8e-7
    assert agreements[0].pixels_max == pytest.approx(0, abs=1e-3)  # measured 2e-5 of 255
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["vision_config"]["num_hidden_layers"] == 2  # of 3: select_layer is -2
    assert (config["vision_feature_layer"], config["vision_feature_select_strategy"]) == (-1, "default")
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<image>") == config["image_token_index"]
    names = {path.name for path in folder.iterdir()}
    assert {
        "generation_config.json",
        "processor_config.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    } <= names


def test_siglip_with_tied_embeddings(tree: Tree, exported: Exported) -> None:
    tree["model"]["vision"] = SIGLIP
    tree["model"]["language"]["config"]["tie_word_embeddings"] = True
    folder, agreements = exported(tree)
    assert max(a.logits for a in agreements) < 2e-6  # measured 3.0e-7
    assert not any("lm_head" in key for key in keys(folder))
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("vision", "strategy"),
    [
        ({**CLIP, "select_tokens": "all"}, "full"),
        ({**CLIP, "select_layer": 0}, "default"),
        ({**SIGLIP, "select_layer": -1, "final_norm": True}, "full"),
        ({**SIGLIP, "select_layer": -1, "final_norm": False}, "full"),
        ({"name": "hf_vision", "final_norm": False, "config": {"model_type": "dinov2", **PLAIN}}, "default"),
        ({"name": "hf_vision", "config": {"model_type": "vit", **PLAIN, "intermediate_size": 64}}, "default"),
        (
            {
                "name": "hf_vision",
                "final_norm": True,
                "config": {"model_type": "vit", **PLAIN, "intermediate_size": 64},
            },
            "default",
        ),
    ],
)
def test_layers_tokens_norms(tree: Tree, exported: Exported, vision: Tree, strategy: str) -> None:
    tree["model"]["vision"] = vision
    folder, agreements = exported(tree)
    assert max(a.logits for a in agreements) < 2e-6  # measured 1.8e-7 to 4.5e-7
    assert json.loads((folder / "config.json").read_text())["vision_feature_select_strategy"] == strategy


def test_positions_that_were_resized(tree: Tree, exported: Exported) -> None:
    tree["model"]["vision"] = {**CLIP, "config": {**CLIP["config"], "image_size": 32}, "image_size": 48}
    tree["datasets"]["tiny"]["vis_processor"] = {"name": "image_eval", "image_size": 48}
    _, agreements = exported(tree)
    assert agreements[0].logits < 2e-6  # measured 3.9e-7


def test_experts_go_out_one_by_one(tree: Tree, exported: Exported) -> None:
    tree["model"]["language"]["config"] |= {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    folder, agreements = exported(tree)
    assert max(a.logits for a in agreements) < 2e-6  # measured 4e-7
    assert sum(".experts.3.gate_proj.weight" in key for key in keys(folder)) == 2  # the hub's layout, in both layers


def test_an_upcycled_language_model(tree: Tree, exported: Exported) -> None:
    tree["model"]["moe"] = {"num_experts": 2, "top_k": 1}
    folder, agreements = exported(tree)
    assert max(a.logits for a in agreements) < 2e-6  # measured 4e-7
    assert json.loads((folder / "config.json").read_text())["text_config"]["model_type"] == "qwen3_moe"


def test_bfloat16(tree: Tree, exported: Exported) -> None:
    folder, agreements = exported(tree, dtype=torch.bfloat16)
    assert max(a.logits for a in agreements) < 2e-6  # measured 3e-7: both in float32 from the same rounded weights
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_user_can_generate(tree: Tree, exported: Exported) -> None:
    folder, _ = exported(tree)
    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    content = [{"type": "image", "image": Image.new("RGB", (60, 40), "red")}, {"type": "text", "text": "what is it"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert (inputs["input_ids"] == model.config.image_token_index).sum() == 16
    answer = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5)[0, inputs["input_ids"].shape[1] :]
    assert len(answer) == 5
    assert model.config.image_token_index not in answer.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projector": {"name": "mlp", "depth": 3}}, "two linear layers"),
        ({"projector": {"name": "mlp", "merge_size": 2}}, "merges no patches"),
        ({"projector": {"name": "linear"}}, "two linear layers"),
        ({"vision": {"name": "timm_vit", "model_name": "vit_tiny_patch16_224", "image_size": 32}}, "tower is one of"),
        ({"vision": {**CLIP, "final_norm": True}}, "final layer norm of a clip_vision_model"),
    ],
)
def test_what_it_has_no_place_for(tree: Tree, exported: Exported, change: Tree, message: str) -> None:
    tree["model"] |= change
    with pytest.raises(ConfigError, match=message):
        exported(tree)
