"""Keys of LAVIS and MiniGPT4Qwen (MPP-LLaVA) YAMLs in this package's words, with one notice for each.

Sources: https://github.com/salesforce/LAVIS (`lavis/runners`, `lavis/projects`) and https://github.com/Coobiw/MPP-LLaVA
(`lavis/models/minigpt4qwen_models`, `lavis/projects`). What is neither known here nor translated stays in the tree, so
that `decode` refuses it by name. A key of ours that stands beside its old name wins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lavis_ds.errors import ConfigError

_BY_LAUNCHER = "no longer needed; the launcher (deepspeed, torchrun, python) decides."
_RUN_DROPPED = {
    **dict.fromkeys(("device", "world_size", "dist_url", "distributed", "gpu", "rank", "dist_backend"), _BY_LAUNCHER),
    "find_unused_parameters": "no longer needed; the engine copes with unused parameters.",
    "use_dist_eval_sampler": "no longer needed; evaluation is always spread over the ranks.",
}
_RUNNERS = ("runner_base", "deepspeed_runner", "runner_iter")
_TASKS = ("image_text_pretrain", "deepspeed_image_text_pretrain")
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}

# DeepSpeed's numbers that `run:` owns; they move when `run:` leaves its key unset.
_DEEPSPEED_NUMBERS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "batch_size_train",
    "gradient_accumulation_steps": "accum_grad_iters",
    "gradient_clipping": "grad_clip",
    "optimizer.params.lr": "init_lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
}

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
_LORA = ("get_lora", "lora_alpha", "lora_r", "lora_dropout")
# Old key -> what it freezes, and what MiniGPT4Qwen does where the key is left out.
_FREEZE: dict[str, tuple[tuple[str, ...], bool]] = {
    "freeze_vit": (("vision.vit",), True),
    "freeze_qformer": (("vision.layer_norm", "projector.qformer"), False),
    "freeze_queries": (("projector.query_tokens",), False),
    "freeze_proj": (("projector.linear",), False),
    "freeze_llm": (("language",), True),
}
_SINGLE_FILES = (".pth", ".pt", ".bin", ".ckpt")

_BUILDERS = (
    "minigpt4_instruction", "llava_instruction", "llava_pretrain", "llava_instruct_100k", "llava_instruct_156k"
)  # fmt: skip
_VIDEO_BUILDERS = ("videochatgpt_100k",)
_SYSTEM = "You are a helpful assistant."
_IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "blip2_image_train": {"name": "image_train", "image_size": 364, "horizontal_flip": True},
    "blip_image_train": {"name": "image_train", "image_size": 384, "horizontal_flip": True},
    "blip_image_eval": {"name": "image_eval", "image_size": 384},
}
_TEXT_PROCESSORS: dict[str, dict[str, Any]] = {
    "base_instruction": {"name": "chat", "system": _SYSTEM},
    "blip_caption": {"name": "chat"},
}


def translate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree in our words, and one line for each old key: what became of it.

    Raises:
        ConfigError: an old key asks for what there is not; every such key is listed.
    """
    tree, log = copy.deepcopy(tree), _Log()
    for name in ("env", "preprocess"):
        if name in tree:
            del tree[name]
            log.notices.append(f"{name}: no longer used; paths and processors are those of datasets:.")
    if isinstance(tree.get("run"), dict):
        _run(_Block("run", tree["run"], log))
    if isinstance(tree.get("model"), dict):
        _model(_Block("model", tree["model"], log))
    if isinstance(tree.get("datasets"), dict):
        tree["datasets"] = {name: _dataset(name, entry, log) for name, entry in tree["datasets"].items()}
    if log.refusals:
        raise ConfigError("\n".join(log.refusals))
    return tree, log.notices


class _Log:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.refusals: list[str] = []


class _Block:
    """One mapping of the tree while its old keys are taken out."""

    def __init__(self, where: str, values: dict[str, Any], log: _Log) -> None:
        self.where, self.values, self.log = where, values, log

    def notice(self, key: str, text: str) -> None:
        self.log.notices.append(f"{self.where}.{key}: {text}")

    def refuse(self, key: str, text: str) -> None:
        self.log.refusals.append(f"{self.where}.{key}: {text}")

    def drop(self, table: dict[str, str]) -> None:
        for key, why in table.items():
            if key in self.values:
                del self.values[key]
                self.notice(key, why)

    def put(self, old: str, new: str, value: Any, note: str = "") -> None:
        """Give our key (dotted for a key inside a block) the value of an old one, and say so."""
        *blocks, name = new.split(".")
        target = self.values
        for block in blocks:
            target = _open(target, block)
        if name in target and target[name] != value:
            self.notice(old, f"gives way to {self.where}.{new}: {target[name]}, which is given too.")
            return
        target[name] = value
        self.notice(old, f"is now {self.where}.{new}: {value}{f' ({note})' if note else ''}.")

    def move(self, old: str, new: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> None:
        if old in self.values:
            self.put(old, new, convert(self.values.pop(old)), note)

    def only(self, key: str, allowed: Any, otherwise: str) -> None:
        """Take out a key that may only say how it is anyway."""
        if key in self.values:
            value = self.values.pop(key)
            if value in (allowed, None):
                self.notice(key, f"no longer needed; {allowed} is how it is.")
            else:
                self.refuse(key, otherwise)

    def rename_value(self, key: str, old: tuple[str, ...], new: str) -> None:
        if self.values.get(key) in old:
            self.notice(key, f"{self.values[key]} is now {new}.")
            self.values[key] = new


def _open(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping under `name`, made where there is none; a part given by name alone becomes one."""
    inner = values.get(name)
    if isinstance(inner, str):
        inner = values[name] = {"name": inner}
    elif inner is None:
        inner = values[name] = {}
    if not isinstance(inner, dict):
        raise ConfigError("must be a mapping.", where=name, given=repr(inner))
    return inner


def _whole(value: Any) -> int:
    """A number as YAML may write it, such as 2e3; 0 where it is none, which no key of ours accepts."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 0


# run:


def _run(run: _Block) -> None:
    before = len(run.log.notices)
    run.rename_value("runner", _RUNNERS, "train")
    run.rename_value("task", _TASKS, "instruct")
    run.drop(_RUN_DROPPED)
    run.move("log_freq", "log_every")
    run.move("grad_norm_clip", "grad_clip")
    run.move("beta2", "optimizer.betas", lambda beta2: [0.9, beta2])
    _precision(run)
    if isinstance(run.values.get("deepspeed_config"), dict):
        _deepspeed_numbers(run, run.values["deepspeed_config"])
    _lengths(run)
    _resume(run)
    run.only("lr_layer_decay", 1, "is not supported. Remove it, or give layers their own lr in run.param_groups.")
    run.only("fsdp", False, "is not supported. Use run.deepspeed_config: zero3 instead.")
    if len(run.log.notices) > before:
        _differences(run)


def _precision(run: _Block) -> None:
    values = run.values
    dtype = values.pop("autocast_dtype", None)
    if "amp" in values:
        amp = values.pop("amp")
        name = str(dtype or "fp16")  # LAVIS runs fp16 where no type is given
        if amp and name not in _PRECISIONS:
            run.refuse("autocast_dtype", f"must be bf16 or fp16. Given: {name}.")
        run.put("amp", "precision", _PRECISIONS.get(name, name) if amp else "fp32")
    if dtype is not None:
        run.notice("autocast_dtype", "no longer needed; run.precision says it.")
    run.drop({"loss_scale": "no longer needed; the loss is scaled, dynamically, with precision: fp16 and only then."})


def _deepspeed_numbers(run: _Block, settings: dict[str, Any]) -> None:
    for old, new in _DEEPSPEED_NUMBERS.items():
        *blocks, name = old.split(".")
        source: Any = settings
        for block in blocks:
            source = source.get(block) if isinstance(source, dict) else None
        if isinstance(source, dict) and name in source and source[name] != "auto" and not _is_set(run.values, new):
            value = source.pop(name)
            run.put(f"deepspeed_config.{old}", new, None if new == "grad_clip" and not value else value)
    enabled = {name: settings[name].get("enabled") for name in ("bf16", "fp16") if isinstance(settings.get(name), dict)}
    if "precision" not in run.values and enabled and all(isinstance(on, bool) for on in enabled.values()):
        for name in enabled:
            del settings[name]["enabled"]
            if not settings[name]:
                del settings[name]
        chosen = next((name for name, on in enabled.items() if on), "fp32")
        run.put(" and ".join(f"deepspeed_config.{name}.enabled" for name in enabled), "precision", chosen)


def _is_set(values: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _lengths(run: _Block) -> None:
    """Old lengths count micro-batches or epochs; ours count optimizer steps."""
    values = run.values
    accumulation = max(_whole(values.get("accum_grad_iters", 1)), 1)
    note = f"micro-batches / {accumulation} accumulated" if accumulation > 1 else ""
    run.move("max_iters", "max_steps", lambda iters: -(-_whole(iters) // accumulation), note)
    inner = -(-_whole(values.get("iters_per_inner_epoch")) // accumulation)
    for old, new in (("save_freq", "save_every"), ("val_freq", "eval_every"), ("eval_freq", "eval_every")):
        if old in values:
            _interval(run, old, new, inner)
    if "iters_per_inner_epoch" in values:
        del values["iters_per_inner_epoch"]
        values.setdefault("save_every", inner)
        if values.get("valid_splits"):
            values.setdefault("eval_every", inner)
        run.notice("iters_per_inner_epoch", f"is now the steps between checkpoints and evaluations: {inner}.")


def _interval(run: _Block, old: str, new: str, inner: int) -> None:
    every = _whole(run.values.pop(old))
    if every <= 0:
        run.put(old, new, None, "never during training; the end is always saved" if new == "save_every" else "never")
    elif inner:
        run.put(old, new, every * inner, "optimizer steps")
    else:
        run.put(old, new, "epoch", f"every epoch, not every {every}; or give optimizer steps" if every > 1 else "")


def _resume(run: _Block) -> None:
    keys = [key for key in ("resume_ckpt_load_dir", "resume_ckpt_tag") if key in run.values]
    if not keys:
        return
    folder, tag = run.values.pop("resume_ckpt_load_dir", None), run.values.pop("resume_ckpt_tag", None)
    if folder:
        run.put(" and ".join(keys), "resume_ckpt_path", f"{folder}/{tag}" if tag else folder)
    else:
        run.notice(" and ".join(keys), "no longer needed; run.resume_ckpt_path or --resume names a checkpoint.")


def _differences(run: _Block) -> None:
    """Where an old file means something else by a key that kept its name."""
    if run.values.get("valid_splits") and "eval_every" not in run.values:
        run.values["eval_every"] = "epoch"
        run.notice("valid_splits", "are evaluated after every epoch, as before: run.eval_every: epoch.")
    if run.values.get("warmup_steps") and _whole(run.values.get("accum_grad_iters", 1)) > 1:
        run.notice("warmup_steps", "counts optimizer steps; it used to count micro-batches.")


# model:


def _model(model: _Block) -> None:
    values = model.values
    is_old = "vit_model" in values or "llm_model" in values
    if "llm_model" in values:
        _open(values, "language").setdefault("name", "hf_causal_lm")
        model.move("llm_model", "language.path")
        model.put("llm_model", "language.gradient_checkpointing", True, "as before")
    _vision(model)
    if "num_query_token" in values:
        _open(values, "projector").setdefault("name", "qformer")
        model.move("num_query_token", "projector.num_query_tokens")
    model.only("qformer_text_input", False, "is not supported: the Q-Former takes no text. Set it to false.")
    model.drop(_MODEL_DROPPED)
    _lora(model)
    _freeze(model, is_old)
    _weights(model)


def _vision(model: _Block) -> None:
    values = model.values
    if "vit_model" in values:
        name = values.pop("vit_model")
        if name == "eva_clip_g":
            values["vision"] = {**_EVA_CLIP_G, **_open(values, "vision")}
            model.notice("vit_model", f"is now model.vision: {_EVA_CLIP_G['model_name']} of timm.")
        else:
            model.refuse("vit_model", f"only eva_clip_g is translated, not {name}. Write model.vision: {{name: ...}}.")
    model.move("image_size", "vision.image_size")
    model.move("drop_path_rate", "vision.drop_path_rate")
    model.move("use_grad_checkpoint", "vision.gradient_checkpointing")


def _lora(model: _Block) -> None:
    keys = [key for key in _LORA if key in model.values]
    wanted = model.values.get("get_lora")
    for key in keys:
        del model.values[key]
    if wanted:
        model.refuse("get_lora", "LoRA is not there yet. Set it to false, and choose what trains with model.freeze.")
    for key in keys if not wanted else []:
        model.notice(key, "left out, since get_lora is false.")


def _freeze(model: _Block, is_old: bool) -> None:
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


def _weights(model: _Block) -> None:
    """`finetuned` goes over `pretrained`, and each counts only where its `load_` switch is on."""
    values = model.values
    had_pretrained = "pretrained" in values
    switches = {key: values.pop(f"load_{key}", None) for key in ("pretrained", "finetuned")}
    paths: dict[str, str | None] = {}
    for key, on in switches.items():
        path = values.pop(key, None)
        paths[key] = path if path and on is not False else None
        if path is not None and paths[key] is None:
            model.notice(key, f"left out, since load_{key} is false." if path else "left out, since it is empty.")
        if on is not None:
            model.notice(f"load_{key}", "no longer needed; weights are loaded where model.pretrained names them.")
    chosen = "finetuned" if paths["finetuned"] else "pretrained"
    path = paths[chosen]
    if path is None:
        if had_pretrained or switches["pretrained"] is False:
            values["pretrained"] = None  # stated, so that it goes over the model type's default
        return
    if str(path).startswith(("http://", "https://")) or str(path).endswith(_SINGLE_FILES):
        model.refuse(
            chosen,
            f"this is a single file of another layout, and a weights folder is needed. Given: {path}. "
            f"Convert it to safetensors keyed by this model's parameter names, or set model.load_{chosen}: false.",
        )
        return
    values["pretrained"] = path
    if chosen == "finetuned":
        beside = "; it must hold the weights of pretrained as well" if paths["pretrained"] else ""
        model.notice("finetuned", f"is now model.pretrained: {path}{beside}.")


# datasets:


def _dataset(name: str, entry: Any, log: _Log) -> Any:
    if entry is not None and not isinstance(entry, dict):
        return entry
    dataset = _Block(f"datasets.{name}", dict(entry or {}), log)
    values = dataset.values
    builder = values.get("builder", name)
    if builder in _VIDEO_BUILDERS or values.get("data_type") == "videos":
        dataset.refuse("data_type", "videos are not there yet; leave this dataset out.")
    if builder in _BUILDERS:
        values["builder"] = "minigpt4qwen_json"
        dataset.notice("builder", f"{builder} is now minigpt4qwen_json.")
    if values.get("data_type") == "images":
        dataset.drop({"data_type": "no longer needed; images is how it is."})
    if isinstance(values.get("build_info"), dict):
        _build_info(dataset)
    _processors(dataset, "vis_processor", _IMAGE_PROCESSORS)
    _processors(dataset, "text_processor", _TEXT_PROCESSORS)
    return values


def _build_info(dataset: _Block) -> None:
    """Files and folders come out of it; what is left is of another builder, and decode names it."""
    info = dict(dataset.values.pop("build_info"))
    note = "a relative path now starts at the working directory, not at cache_root"
    if isinstance(info.get("annotations"), dict):
        others = {split: _annotation(dataset, split, source, note) for split, source in info.pop("annotations").items()}
        info |= {"annotations": others} if any(others.values()) else {}
    if isinstance(info.get("images"), dict) and set(info["images"]) == {"storage"}:
        dataset.put("build_info.images.storage", "image_root", info.pop("images")["storage"], note)
    if info:
        dataset.values["build_info"] = info


def _annotation(dataset: _Block, split: str, source: Any, note: str) -> Any:
    """Take the files of a split out; returns what is not understood."""
    where = f"build_info.annotations.{split}"
    others = dict(source) if isinstance(source, dict) else {"storage": source}
    storage, url = others.pop("storage", None), others.pop("url", None)
    files = storage or url
    if any(str(file).startswith(("http://", "https://")) for file in (files if isinstance(files, list) else [files])):
        dataset.refuse(where, f"nothing is downloaded; give the file's path as storage. Given: {files}.")
    else:
        dataset.put(where, f"annotations.{split}", files, note)
        if storage and url:
            dataset.notice(f"{where}.url", "no longer needed; storage is read, and nothing is downloaded.")
    return others


def _processors(dataset: _Block, key: str, table: dict[str, dict[str, Any]]) -> None:
    options = dataset.values.get(key)
    if not isinstance(options, dict):
        return
    single = "name" in options
    phases = {"": options} if single else options
    translated = {phase: _processor(dataset, f"{key}.{phase}".rstrip("."), o, table) for phase, o in phases.items()}
    dataset.values[key] = translated[""] if single else translated


def _processor(dataset: _Block, where: str, options: Any, table: dict[str, dict[str, Any]]) -> Any:
    old = options.get("name") if isinstance(options, dict) else options
    if not isinstance(old, str) or old not in table:
        return options
    given = {name: value for name, value in options.items() if name != "name"} if isinstance(options, dict) else {}
    if given.pop("max_words", None) is not None:
        dataset.notice(f"{where}.max_words", "no longer needed; model.max_txt_len bounds a sample.")
    new = {**table[old], **given}
    without = ", without its RandAugment" if old == "blip_image_train" else ""
    words = ", ".join(f"{name}: {value}" for name, value in new.items())
    dataset.notice(where, f"{old} is now {{{words}}}{without}.")
    return new
