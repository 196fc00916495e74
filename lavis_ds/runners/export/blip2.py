"""A plain Vision Transformer of timm, a Q-Former and a language model: `Blip2ForConditionalGeneration`."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Blip2Config, Blip2ForConditionalGeneration, Blip2Processor, Blip2VisionConfig

from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.projectors.qformer import QFormerProjector
from lavis_ds.models.vision.timm_vit import TimmViT
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.export.language import (
    IMAGE_TOKEN,
    language_of,
    language_pieces,
    text_config,
    with_image_token,
)
from lavis_ds.runners.export.target import Piece, Target, cannot_express, moved, tensor_names

_NAME = "Blip2ForConditionalGeneration"
_EMBEDDINGS = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
_BLOCK = {
    "norm1.weight": "layer_norm1.weight",
    "norm1.bias": "layer_norm1.bias",
    "norm2.weight": "layer_norm2.weight",
    "norm2.bias": "layer_norm2.bias",
    "attn.qkv.weight": "self_attn.qkv.weight",
    "attn.qkv.bias": "self_attn.qkv.bias",
    "attn.proj.weight": "self_attn.projection.weight",
    "attn.proj.bias": "self_attn.projection.bias",
    "mlp.fc1.weight": "mlp.fc1.weight",
    "mlp.fc1.bias": "mlp.fc1.bias",
    "mlp.fc2.weight": "mlp.fc2.weight",
    "mlp.fc2.bias": "mlp.fc2.bias",
}
_SPLIT_BIAS = ("attn.q_bias", "attn.v_bias")
"""EVA's: keys have no bias."""


def target(model: Vlm) -> Target:
    """What `model` becomes.

    Raises:
        ConfigError: the class has no place for one of its parts or options.
    """
    language, vision, projector = language_of(model, _NAME), _vision_of(model), model.projector
    assert isinstance(projector, QFormerProjector)
    tokenizer, image_token_id = with_image_token(model.tokenizer)
    text = text_config(language, image_token_id)
    num_queries = int(projector.query_tokens.shape[1])
    config = Blip2Config(
        vision_config=_vision_config(vision),
        qformer_config=copy.deepcopy(projector.qformer.config),
        text_config=text,
        num_query_tokens=num_queries,
        image_token_index=image_token_id,
    )

    def make_processor(_: ProcessorConfig, image_processor: Any, chat_template: str | None) -> Any:
        # Without num_query_tokens it leaves text as it is: pictures stand where the chat template writes them, and not
        # before everything else, as in BLIP-2.
        processor_class: Any = Blip2Processor  # untyped
        processor = processor_class(image_processor, tokenizer, num_query_tokens=None)
        processor.chat_template = chat_template
        return processor

    return Target(
        Blip2ForConditionalGeneration,
        config,
        _pieces(model, language, text.vocab_size),
        tokenizer,
        image_token_id,
        IMAGE_TOKEN * num_queries,
        make_processor,
        *vision.pixels.statistics,
        needs_picture=True,
        notes=_notes(vision),
    )


def _pieces(model: Vlm, language: HFCausalLM, rows: int) -> dict[str, Piece]:
    prefixes = {
        "vision.layer_norm.": "vision_model.post_layernorm.",
        "projector.qformer.": "qformer.",
        "projector.linear.": "language_projection.",
    }
    return {
        "query_tokens": Piece(("projector.query_tokens",)),
        **_vit_pieces(model.vision),
        **moved(model, prefixes),
        **language_pieces(model, language, rows),
    }


def _vit_pieces(vision: nn.Module) -> dict[str, Piece]:
    """Pieces of the tower.

    Raises:
        ConfigError: it has a tensor that a plain Vision Transformer has not.
    """
    pieces: dict[str, Piece] = {}
    for name in tensor_names(vision):
        if not name.startswith("vit."):
            continue
        inner = name.removeprefix("vit.")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", inner)
        if inner in _EMBEDDINGS:
            pieces[f"vision_model.{_EMBEDDINGS[inner]}"] = Piece((f"vision.{name}",))
        elif block and block[2] in _BLOCK:
            pieces[f"vision_model.encoder.layers.{block[1]}.{_BLOCK[block[2]]}"] = Piece((f"vision.{name}",))
        elif block and block[2] in _SPLIT_BIAS:
            both = tuple(f"vision.vit.blocks.{block[1]}.{part}" for part in _SPLIT_BIAS)
            pieces[f"vision_model.encoder.layers.{block[1]}.self_attn.qkv.bias"] = Piece(both, _joined_bias)
        else:
            raise _other_tower(f"its tower has no {inner}")
    return pieces


def _joined_bias(parts: Any) -> Tensor:
    query, value = parts
    return torch.cat([query, torch.zeros_like(query), value])


def _vision_of(model: Vlm) -> TimmViT:
    """The tower, once it is known to compute what `Blip2VisionModel` does.

    Raises:
        ConfigError: it does not.
    """
    vision = model.vision
    if not isinstance(vision, TimmViT):
        raise _other_tower("its tower is BLIP-2's own", given=type(vision).__name__)
    vit, first = vision.vit, vision.vit.blocks[0]
    num_norms = sum(not isinstance(norm, nn.Identity) for norm in (vit.norm, vision.layer_norm))
    plain = isinstance(first.mlp.act, nn.GELU) and first.mlp.act.approximate == "none"
    sees_class = vision.num_tokens == vit.patch_embed.num_patches + 1
    findings = [
        (vit.num_prefix_tokens == 1, "its tower has one token before the patches", f"{vit.num_prefix_tokens}"),
        (sees_class, "its Q-Former sees the class token", "select_tokens: patch"),
        (num_norms == 1, "its tower ends with one layer norm", f"{num_norms} (final_norm and layer_norm)"),
        (getattr(vit, "rope", None) is None, "its tower has no rotary positions", "rotary positions"),
        (plain, "its tower's activation is GELU", type(first.mlp.act).__name__),
        (_positions(vit) == vision.num_tokens, "its tower has a position for each token", f"{_positions(vit)}"),
    ]
    for fits, what, given in findings:
        if not fits:
            raise _other_tower(what, given=given)
    return vision


def _positions(vit: Any) -> int:
    return 0 if vit.pos_embed is None else int(vit.pos_embed.shape[1])


def _vision_config(vision: TimmViT) -> Blip2VisionConfig:
    vit, first = vision.vit, vision.vit.blocks[0]
    names = tensor_names(first)
    return Blip2VisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=int(first.mlp.fc1.out_features),
        num_hidden_layers=len(vit.blocks),
        num_attention_heads=int(first.attn.num_heads),
        image_size=vision.image_size,
        patch_size=int(vit.patch_embed.patch_size[0]),
        hidden_act="gelu",
        layer_norm_eps=float(first.norm1.eps),
        qkv_bias="attn.qkv.bias" in names or "attn.q_bias" in names,
    )


def _notes(vision: TimmViT) -> tuple[str, ...]:
    norm = vision.vit.norm if isinstance(vision.layer_norm, nn.Identity) else vision.layer_norm
    eps, shared = norm.eps, vision.vit.blocks[0].norm1.eps
    if eps == shared:
        return ()
    return (
        f"The layer norm behind the tower has eps {eps:g} here, and that of the blocks, {shared:g}, in {_NAME}: "
        "features of a trained ViT-g are so large that this does not show, but small random ones are not.",
    )


def _other_tower(why: str, given: object = None) -> Exception:
    return cannot_express(
        _NAME,
        why,
        where="model.vision",
        given=given,
        expected="timm_vit of a plain Vision Transformer with class token, such as eva_giant_patch14_clip_224",
    )
