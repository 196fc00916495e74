"""The original Qwen (Qwen-7B, Qwen-14B, ...): its weights and shape as those of transformers' Qwen2.

The two differ in names, in one matrix for query, key and value, and in an intermediate size that counts both halves of
the gated feed-forward layer.

Source: https://huggingface.co/Qwen/Qwen-7B-Chat (`modeling_qwen.py`, `configuration_qwen.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lavis_ds.errors import ConfigError
from lavis_ds.models.conversion.names import rename
from lavis_ds.models.conversion.stored import Stored

_RENAMES = (
    (r"transformer\.wte\.", "model.embed_tokens."),
    (r"transformer\.ln_f\.", "model.norm."),
    (r"transformer\.h\.(\d+)\.ln_1\.", r"model.layers.\1.input_layernorm."),
    (r"transformer\.h\.(\d+)\.ln_2\.", r"model.layers.\1.post_attention_layernorm."),
    (r"transformer\.h\.(\d+)\.attn\.c_proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"transformer\.h\.(\d+)\.mlp\.w1\.", r"model.layers.\1.mlp.up_proj."),
    (r"transformer\.h\.(\d+)\.mlp\.w2\.", r"model.layers.\1.mlp.gate_proj."),  # the half that SiLU is applied to
    (r"transformer\.h\.(\d+)\.mlp\.c_proj\.", r"model.layers.\1.mlp.down_proj."),
)
_FUSED = re.compile(r"transformer\.h\.(\d+)\.attn\.c_attn\.(weight|bias)")
_CONSTANT = re.compile(r"transformer\.(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq)")


def convert(tensors: Mapping[str, Stored], prefix: str = "") -> dict[str, Stored]:
    """The tensors under Qwen2's names where they have the original Qwen's; others as they are.

    Args:
        tensors: name -> tensor.
        prefix: what stands before the language model's names.
    """
    renamed: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or _CONSTANT.fullmatch(own):
            renamed |= {} if _CONSTANT.fullmatch(own) else {name: tensor}
        elif fused := _FUSED.fullmatch(own):
            for letter, part in zip("qkv", tensor.split(3), strict=True):
                renamed[f"{prefix}model.layers.{fused[1]}.self_attn.{letter}_proj.{fused[2]}"] = part
        else:
            renamed[prefix + rename(own, _RENAMES)] = tensor
    return renamed


def qwen2_config(shape: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`config.json` of the original Qwen as that of a Qwen2.

    Positions beyond `seq_length` are left to Qwen2's rotation: the original's dynamic NTK and log-n scaling, which
    begin there and only in generation, are not reproduced.

    Raises:
        ConfigError: the shape is one that Qwen2 has not.
    """
    width, heads = int(shape["hidden_size"]), int(shape["num_attention_heads"])
    wanted = {"no_bias": True, "rotary_pct": 1.0, "kv_channels": width // heads, "scale_attn_weights": True}
    for key, value in wanted.items():
        if shape.get(key, value) != value:
            raise ConfigError(f"Qwen2 has no other {key}.", where=where, given=shape[key], expected=str(value))
    return {
        "model_type": "qwen2",
        "vocab_size": shape["vocab_size"],
        "hidden_size": width,
        "intermediate_size": int(shape["intermediate_size"]) // 2,
        "num_hidden_layers": shape["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": shape.get("layer_norm_epsilon", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(shape.get("rotary_emb_base", 10000))},
        "max_position_embeddings": shape.get("seq_length", shape.get("max_position_embeddings", 8192)),
        "initializer_range": shape.get("initializer_range", 0.02),
        "tie_word_embeddings": shape.get("tie_word_embeddings", False),
        "architectures": ["Qwen2ForCausalLM"],
    }
