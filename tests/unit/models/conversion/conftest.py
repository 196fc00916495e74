"""Tiny files in the layouts of LAVIS and MiniGPT4Qwen, and the model they are for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from lavis_ds.config.decode import decode
from lavis_ds.models.configs import MiniGPT4QwenConfig
from lavis_ds.models.minigpt4qwen import MiniGPT4Qwen

Tensors = dict[str, Tensor]

WIDTH, HEADS, DEPTH, MLP = 32, 4, 2, 139
"""Of the tower; DEPTH is LAVIS's, which leaves the last of EVA-CLIP's blocks out."""
QUERIES, Q_WIDTH, Q_LAYERS, Q_MLP = 5, 24, 3, 40
LLM: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": 400,
}  # fmt: skip


class Random:
    """Tensors of one seed, scaled so that activations keep their size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5

    def linear(self, name: str, out: int, into: int) -> Tensors:
        return {f"{name}.weight": self(out, into), f"{name}.bias": self(out)}

    def norm(self, name: str, width: int) -> Tensors:
        return {f"{name}.weight": 1 + self(width), f"{name}.bias": self(width)}


def eva_tensors(depth: int = DEPTH, prefix: str = "", image_size: int = 28) -> Tensors:
    """`lavis/models/eva_vit.py`, as in eva_vit_g.pth."""
    r = Random(1)
    tensors = {"cls_token": r(1, 1, WIDTH), "pos_embed": r(1, (image_size // 14) ** 2 + 1, WIDTH)}
    tensors |= {"patch_embed.proj.weight": r(WIDTH, 3, 14, 14) / 14, "patch_embed.proj.bias": r(WIDTH)}
    for n in range(depth):
        b = f"blocks.{n}"
        tensors |= {f"{b}.attn.q_bias": r(WIDTH), f"{b}.attn.v_bias": r(WIDTH)}
        tensors |= {f"{b}.attn.qkv.weight": 2 * r(3 * WIDTH, WIDTH)}
        tensors |= r.linear(f"{b}.attn.proj", WIDTH, WIDTH) | r.norm(f"{b}.norm1", WIDTH) | r.norm(f"{b}.norm2", WIDTH)
        tensors |= r.linear(f"{b}.mlp.fc1", MLP, WIDTH) | r.linear(f"{b}.mlp.fc2", WIDTH, MLP)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def qformer_tensors() -> Tensors:
    """`Qformer`, `query_tokens` and `ln_vision` of `Blip2Qformer`, the text half with them."""
    r, w = Random(2), Q_WIDTH
    tensors = {"query_tokens": r(1, QUERIES, w)} | r.norm("ln_vision", WIDTH)
    embeddings = "Qformer.bert.embeddings"
    tensors |= {f"{embeddings}.word_embeddings.weight": r(50, w), f"{embeddings}.position_embeddings.weight": r(20, w)}
    tensors |= {f"{embeddings}.position_ids": torch.arange(20)[None]} | r.norm(f"{embeddings}.LayerNorm", w)
    for n in range(Q_LAYERS):
        layer = f"Qformer.bert.encoder.layer.{n}"
        kinds = [("attention", w)] + ([("crossattention", WIDTH)] if n % 2 == 0 else [])
        for kind, into in kinds:
            tensors |= r.linear(f"{layer}.{kind}.self.query", w, w)
            tensors |= r.linear(f"{layer}.{kind}.self.key", w, into) | r.linear(f"{layer}.{kind}.self.value", w, into)
            tensors |= r.linear(f"{layer}.{kind}.output.dense", w, w) | r.norm(f"{layer}.{kind}.output.LayerNorm", w)
        for half in ("", "_query"):
            tensors |= r.linear(f"{layer}.intermediate{half}.dense", Q_MLP, w)
            tensors |= r.linear(f"{layer}.output{half}.dense", w, Q_MLP) | r.norm(f"{layer}.output{half}.LayerNorm", w)
    return tensors | {"Qformer.cls.predictions.bias": r(50)} | r.linear("Qformer.cls.predictions.transform.dense", w, w)


def without_text(tensors: Tensors) -> Tensors:
    """As MiniGPT4Qwen and BLIP-2's second stage cut the Q-Former."""
    text = r"Qformer\.(cls|bert\.embeddings\.(word|position)|bert\.encoder\.layer\.\d\.(intermediate|output)\.)"
    return {name: tensor for name, tensor in tensors.items() if not re.match(text, name)}


def qwen_tensors(prefix: str = "llm_model.") -> Tensors:
    """The original Qwen's, of the shape of LLM."""
    r, w, ids = Random(3), LLM["hidden_size"], LLM["vocab_size"]
    tensors = {"transformer.wte.weight": r(ids, w), "lm_head.weight": r(ids, w), "transformer.ln_f.weight": 1 + r(w)}
    for n in range(LLM["num_hidden_layers"]):
        h, hidden = f"transformer.h.{n}", LLM["intermediate_size"]
        tensors |= {f"{h}.ln_1.weight": 1 + r(w), f"{h}.ln_2.weight": 1 + r(w), f"{h}.attn.c_proj.weight": r(w, w)}
        tensors |= r.linear(f"{h}.attn.c_attn", 3 * w, w)
        tensors |= {f"{h}.mlp.w1.weight": r(hidden, w), f"{h}.mlp.w2.weight": r(hidden, w)}
        tensors |= {f"{h}.mlp.c_proj.weight": r(w, hidden)}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def projection_tensors(name: str = "llm_proj", width: int = LLM["hidden_size"]) -> Tensors:
    return Random(4).linear(name, width, Q_WIDTH)


@pytest.fixture
def llm_folder(tmp_path: Path, tokenizer_dir: str) -> str:
    """A language model of shape LLM as on the hub, with other weights than `qwen_tensors`."""
    folder = tmp_path / "llm"
    shape = Qwen2Config(**{key: value for key, value in LLM.items() if key != "model_type"})
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(llm_folder: str) -> Callable[..., MiniGPT4Qwen]:
    """MiniGPT4Qwen at the size of the files above, in evaluation mode; keyword arguments are keys of `model:`."""

    def build(image_size: int = 28, vision: dict[str, Any] | None = None, **options: Any) -> MiniGPT4Qwen:
        tree = {
            "arch": "minigpt4qwen",
            "vision": {
                "name": "timm_vit",
                "model_name": "eva_giant_patch14_clip_224",
                "image_size": image_size,
                "model_args": {"embed_dim": WIDTH, "depth": DEPTH + 1, "num_heads": HEADS},
                "select_layer": -2,
                "final_norm": False,
                "layer_norm": True,
                "select_tokens": "all",
                **(vision or {}),
            },
            "projector": {
                "name": "qformer",
                "num_query_tokens": QUERIES,
                "num_hidden_layers": Q_LAYERS,
                "hidden_size": Q_WIDTH,
                "num_attention_heads": 3,
                "intermediate_size": Q_MLP,
            },
            "language": {"name": "hf_causal_lm", "path": llm_folder},
            **options,
        }
        model = MiniGPT4Qwen.from_config(decode(MiniGPT4QwenConfig, tree))
        model.eval()
        return model

    return build
