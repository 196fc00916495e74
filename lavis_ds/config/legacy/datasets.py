"""Old keys of an entry of `datasets:`."""

from __future__ import annotations

from typing import Any

from lavis_ds.config.legacy.block import Block, Log

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


def translate_dataset(name: str, entry: Any, log: Log) -> Any:
    """The entry in today's keys."""
    if entry is not None and not isinstance(entry, dict):
        return entry
    dataset = Block(f"datasets.{name}", dict(entry or {}), log)
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


def _build_info(dataset: Block) -> None:
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


def _annotation(dataset: Block, split: str, source: Any, note: str) -> Any:
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


def _processors(dataset: Block, key: str, table: dict[str, dict[str, Any]]) -> None:
    options = dataset.values.get(key)
    if not isinstance(options, dict):
        return
    single = "name" in options
    phases = {"": options} if single else options
    translated = {phase: _processor(dataset, f"{key}.{phase}".rstrip("."), o, table) for phase, o in phases.items()}
    dataset.values[key] = translated[""] if single else translated


def _processor(dataset: Block, where: str, options: Any, table: dict[str, dict[str, Any]]) -> Any:
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
