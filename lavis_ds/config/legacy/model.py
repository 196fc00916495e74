"""Old keys of `model:`."""

from __future__ import annotations

from lavis_ds.config.legacy.block import Block, open_block

# BLIP-2's tower: the second last of 40 blocks, class token kept, a layer norm of its own instead of the encoder's.
_EVA_CLIP_G = {
    "name": "timm_vit", "model_name": "eva_giant_patch14_clip_224", "pretrained": True,
    "select_layer": -2, "select_tokens": "all", "final_norm": False, "layer_norm": True,
}  # fmt: skip
_MODEL_DROPPED = {
    "llm_device_map": "no longer needed; the engine places the language model.",
    "vit_precision": "no longer needed; run.precision holds for every part.",
    "enable_autocast": "no longer needed; run.precision holds for every part.",
}
_URLS = ("http://", "https://")
_LORA = ("get_lora", "lora_alpha", "lora_r", "lora_dropout")
# Old key -> what it freezes, and what MiniGPT4Qwen does where the key is left out.
_FREEZE: dict[str, tuple[tuple[str, ...], bool]] = {
    "freeze_vit": (("vision.vit",), True),
    "freeze_qformer": (("vision.layer_norm", "projector.qformer"), False),
    "freeze_queries": (("projector.query_tokens",), False),
    "freeze_proj": (("projector.linear",), False),
    "freeze_llm": (("language",), True),
}


def translate_model(model: Block) -> None:
    """Put today's keys in place of the old ones."""
    values = model.values
    is_old = "vit_model" in values or "llm_model" in values
    if "llm_model" in values:
        open_block(values, "language").setdefault("name", "hf_causal_lm")
        model.move("llm_model", "language.path")
        model.put("llm_model", "language.gradient_checkpointing", True, "as before")
    _vision(model)
    if "num_query_token" in values:
        open_block(values, "projector").setdefault("name", "qformer")
        model.move("num_query_token", "projector.num_query_tokens")
    model.only("qformer_text_input", False, "is not supported: the Q-Former takes no text. Set it to false.")
    model.drop(_MODEL_DROPPED)
    _lora(model)
    _freeze(model, is_old)
    _weights(model)


def _vision(model: Block) -> None:
    values = model.values
    if "vit_model" in values:
        name = values.pop("vit_model")
        if name == "eva_clip_g":
            values["vision"] = {**_EVA_CLIP_G, **open_block(values, "vision")}
            model.notice("vit_model", f"is now model.vision: {_EVA_CLIP_G['model_name']} of timm.")
        else:
            model.refuse("vit_model", f"only eva_clip_g is translated, not {name}. Write model.vision: {{name: ...}}.")
    model.move("image_size", "vision.image_size")
    model.move("drop_path_rate", "vision.drop_path_rate")
    model.move("use_grad_checkpoint", "vision.gradient_checkpointing")


def _lora(model: Block) -> None:
    keys = [key for key in _LORA if key in model.values]
    wanted = model.values.get("get_lora")
    for key in keys:
        del model.values[key]
    if wanted:
        model.refuse("get_lora", "LoRA is not there yet. Set it to false, and choose what trains with model.freeze.")
    for key in keys if not wanted else []:
        model.notice(key, "left out, since get_lora is false.")


def _freeze(model: Block, is_old: bool) -> None:
    values = model.values
    model.only("unfreeze_pos_embed", False, "is not supported beside a frozen tower. Set it to false.")
    frozen: list[str] = []
    for key, (patterns, default) in _FREEZE.items():
        given = key in values
        if values.pop(key, default and is_old):
            frozen += patterns
            said = "is now" if given else "was left out, and is true then, as before:"
            model.notice(key, f"{said} {', '.join(patterns)} in model.freeze.")
        elif given:
            model.notice(key, "no longer needed; what model.freeze does not list trains.")
    if frozen:
        listed = values.get("freeze") or []
        listed = [listed] if isinstance(listed, str) else list(listed)
        values["freeze"] = [*listed, *(pattern for pattern in frozen if pattern not in listed)]


def _weights(model: Block) -> None:
    """`pretrained` and `finetuned` count only where their `load_` switch is on; both may, and `finetuned` goes over."""
    values = model.values
    for key in ("pretrained", "finetuned"):
        on = values.pop(f"load_{key}", None)
        if on is not None:
            model.notice(f"load_{key}", f"no longer needed; weights are loaded where model.{key} names them.")
        path = values.get(key)
        if str(path).startswith(_URLS) and on is not False:
            model.refuse(key, f"nothing is downloaded; give the file's path. Given: {path}.")
        elif path is not None and (not path or on is False):
            values[key] = None  # stated, so that it goes over the model type's default
            model.notice(key, f"left out, since load_{key} is false." if path else "left out, since it is empty.")
        elif on is False:
            values[key] = None
