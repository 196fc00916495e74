from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from lavis_ds.errors import ConfigError
from tests.unit.runners.export.conftest import CLIP, EVA, QFORMER, Tree

Exported = Callable[..., Any]


def adapted(tree: Tree, *, vision: Tree = CLIP, **lora: Any) -> Tree:
    tree["model"]["language"]["lora"] = {"r": 4, **lora}
    tree["model"]["vision"] = {**vision, "lora": {"r": 2, "lora_alpha": 7, **lora}}
    return tree


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_merged(tree: Tree, exported: Exported, options: Tree) -> None:
    folder, agreements = exported(adapted(tree, **options))
    # Our model adds adapters in every layer's forward pass; measured 1.3e-6, 6.0e-7, 9e-7.
    assert max(a.logits for a in agreements) < 5e-6
    assert not (folder / "adapter").exists()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert not any("lora" in key or "base_layer" in key for key in file.keys())  # noqa: SIM118


def test_merged_before_it_is_rounded(tree: Tree, exported: Exported) -> None:
    _, agreements = exported(adapted(tree), dtype=torch.bfloat16)
    assert max(a.logits for a in agreements) < 5e-6  # measured 3.3e-7, from the same rounded weights


def test_merged_into_eva(tree: Tree, exported: Exported) -> None:
    def large(model: Any) -> None:
        model.vision.vit.pos_embed.mul_(50)

    tree["model"] |= {"arch": "minigpt4qwen", "projector": QFORMER}
    _, agreements = exported(adapted(tree, vision=EVA, target_modules=["fc1", "fc2"]) | _only_q(tree), edit=large)
    assert max(a.logits for a in agreements) < 5e-6  # measured 4e-7


def _only_q(tree: Tree) -> Tree:
    tree["model"]["language"]["lora"] = {"r": 4, "target_modules": ["q_proj"]}
    return {}


def test_merged_into_experts(qwen_vl: Callable[[str], Tree], exported: Exported) -> None:
    tree = qwen_vl("qwen3_vl_moe")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tree["model"]["language"]["lora"] = {"r": 2, "target_modules": ["q_proj"], "target_parameters": parameters}
    _, agreements = exported(tree)
    assert max(a.logits for a in agreements) < 5e-6  # measured 1e-6


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_kept(tree: Tree, exported: Exported, options: Tree) -> None:
    folder, agreements = exported(adapted(tree, **options), adapter="keep")
    assert max(a.logits for a in agreements) < 2e-6  # measured 3.0e-7
    base: Any = AutoModelForImageTextToText.from_pretrained(folder)
    ids = {"input_ids": torch.arange(4, 20)[None]}
    before = base(**ids).logits
    after = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()(**ids).logits
    assert (before - after).abs().max() > 1e-2  # the adapter has something to say


def test_experts_adapters_can_not_be_kept(qwen_vl: Callable[[str], Tree], exported: Exported) -> None:
    tree = qwen_vl("qwen3_vl_moe")
    tree["model"]["language"]["lora"] = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    with pytest.raises(ConfigError, match="target_parameters"):
        exported(tree, adapter="keep")


def test_parts_of_two_kinds_can_not_be_kept_as_one(tree: Tree, exported: Exported) -> None:
    adapted(tree)["model"]["vision"]["lora"]["use_dora"] = True
    with pytest.raises(ConfigError, match="different use_dora"):
        exported(tree, adapter="keep")
