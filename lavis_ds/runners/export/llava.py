"""A tower of transformers, two linear layers and a language model: `LlavaForConditionalGeneration`."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.projectors.mlp import MLPProjector
from lavis_ds.models.vision.hf_vision import HFVision
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.export.language import (
    IMAGE_TOKEN,
    language_of,
    language_pieces,
    text_config,
    with_image_token,
)
from lavis_ds.runners.export.target import Piece, Target, cannot_express, constant, moved

_NAME = "LlavaForConditionalGeneration"
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_NORMED_OUTPUT = {"siglip_vision_model": "post_layernorm", "vit": "layernorm"}
"""Final layer norm of the families that apply it to all tokens, and can count its output as their last hidden state."""


def target(model: Vlm) -> Target:
    """What `model` becomes.

    The tower goes out as long as it is here, up to the selected layer, whose output is then its last hidden state.

    Raises:
        ConfigError: the class has no place for one of its parts or options.
    """
    language, vision = language_of(model, _NAME), _vision_of(model)
    _check_projector(model)
    tokenizer, image_token_id = with_image_token(model.tokenizer)
    text = text_config(language, image_token_id)
    strategy = _select_strategy(vision)
    config = LlavaConfig(
        vision_config=_vision_config(vision),
        text_config=text,
        image_token_index=image_token_id,
        image_seq_length=int(model.tokens_per_image),
        vision_feature_layer=-1 if vision.tower.config.num_hidden_layers else 0,
        vision_feature_select_strategy=strategy,
        projector_hidden_act="gelu",
        tie_word_embeddings=bool(text.tie_word_embeddings),
    )

    def make_processor(_: ProcessorConfig, image_processor: Any, chat_template: str | None) -> Any:
        processor_class: Any = LlavaProcessor  # untyped
        return processor_class(
            image_processor,
            tokenizer,
            patch_size=int(vision.tower.config.patch_size),
            vision_feature_select_strategy=strategy,
            num_additional_image_tokens=vision.num_prefix_tokens,
            chat_template=chat_template,
            image_token=IMAGE_TOKEN,
        )

    made = Target(
        LlavaForConditionalGeneration,
        config,
        _pieces(model, language, vision, text.vocab_size),
        tokenizer,
        image_token_id,
        IMAGE_TOKEN,
        make_processor,
        *vision.pixels.statistics,
    )
    return replace(made, pieces={**made.pieces, **_unused(made)})


def _pieces(model: Vlm, language: HFCausalLM, vision: HFVision, rows: int) -> dict[str, Piece]:
    prefixes = {
        "vision.tower.": f"{_TOWER}.",
        "projector.layers.0.": f"{_PROJECTOR}.linear_1.",
        "projector.layers.2.": f"{_PROJECTOR}.linear_2.",
    }
    norm = _norm_name(vision)
    if norm is not None:
        prefixes["vision.norm."] = f"{_TOWER}.{norm}."
    inside = language_pieces(model, language, rows, decoder="model.language_model", head="lm_head")
    return moved(model, prefixes) | inside


def _unused(made: Target) -> dict[str, Piece]:
    """What the tower of transformers has behind the selected layer or for masking: nothing that is used reads it."""
    state = made.skeleton().state_dict()
    missing = [name for name in state if name.startswith(f"{_TOWER}.") and name not in made.pieces]
    return {name: constant(state[name].shape, float("norm" in name and name.endswith(".weight"))) for name in missing}


def _vision_of(model: Vlm) -> HFVision:
    vision = model.vision
    if not isinstance(vision, HFVision):
        raise cannot_express(
            _NAME,
            "its vision tower is one of transformers",
            where="model.vision.name",
            given=type(vision).__name__,
            expected="hf_vision (or, behind a Q-Former, timm_vit)",
        )
    return vision


def _check_projector(model: Vlm) -> None:
    projector = model.projector
    if not isinstance(projector, MLPProjector) or projector.merge_size != 1 or len(projector.layers) != 3:
        options = model.config.model_dump().get("projector")
        raise cannot_express(
            _NAME,
            "its projector is two linear layers, and merges no patches",
            where="model.projector",
            given=options,
            expected="{name: mlp, depth: 2, merge_size: 1}, or qformer",
        )


def _vision_config(vision: HFVision) -> Any:
    config = copy.deepcopy(vision.tower.config)
    table = getattr(vision.tower.embeddings, "position_embedding", None)
    if isinstance(table, nn.Embedding):  # of CLIP and SigLIP, resized where pictures have another size
        config.image_size = vision.image_size
    resizes = "interpolate_pos_encoding" in inspect.signature(vision.tower.forward).parameters
    if resizes and vision.image_size != config.image_size:
        raise cannot_express(
            _NAME,
            f"it does not interpolate the positions of a {config.model_type}",
            where="model.vision.image_size",
            given=vision.image_size,
            expected=str(config.image_size),
        )
    config.num_hidden_layers = max(1, config.num_hidden_layers)  # it gives hidden states of towers with layers only
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False
    if _norm_name(vision) is not None:
        config.tie_last_hidden_states = True  # the last hidden state is then the tower's output, which is normed
    return config


def _norm_name(vision: HFVision) -> str | None:
    """The module that the detached final norm was; None where none is applied."""
    if not list(vision.norm.parameters()):
        return None
    kind = str(vision.tower.config.model_type)
    if kind in _NORMED_OUTPUT:
        return _NORMED_OUTPUT[kind]
    raise cannot_express(
        _NAME,
        f"it does not apply the final layer norm of a {kind} to patches",
        where="model.vision.final_norm",
        given=True,
        expected="false",
    )


def _select_strategy(vision: HFVision) -> Literal["default", "full"]:
    """`default` drops the first token, `full` none."""
    grid = (vision.image_size // int(vision.tower.config.patch_size)) ** 2
    num_dropped = grid + vision.num_prefix_tokens - vision.num_tokens
    if num_dropped > 1:
        raise cannot_express(
            _NAME,
            "it drops one token before the patches at most",
            where="model.vision.select_tokens",
            given=f"patch, where the tower has {num_dropped} other tokens",
            expected="all",
        )
    return "default" if num_dropped else "full"
