"""Configurations, weights and tokenizers of Hugging Face, by folder, hub id or shape; failures in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as hf_logging

from lavis_ds import shares
from lavis_ds.errors import CheckpointError, ConfigError, did_you_mean
from lavis_ds.models.conversion import qwen_folder, qwen_tokenizer
from lavis_ds.models.skeleton import reads_weights

_UNDECLARED = {"qwen3_moe": {"head_dim"}}
"""model_type -> keys that its code reads and the hub's files have, but its configuration class does not name."""

_OLD_KEYS = {"model_type", "architectures", "torch_dtype", "transformers_version", "rope_theta", "rope_scaling"}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*", "*.tiktoken", "sentencepiece*")


def read_config(path: str, where: str) -> Any:
    """The model configuration at a folder or hub id.

    Raises:
        CheckpointError: there is nothing, or no model.
    """
    with explained(path, where), quiet():
        if original := qwen_folder.find(path):
            return qwen_folder.read_config(original, where)
        _require(path, ["config.json"], "is no model: it has no config.json")
        return AutoConfig.from_pretrained(os.path.expanduser(path), trust_remote_code=False)


def config_of_shape(shape: Mapping[str, Any], where: str, **defaults: Any) -> Any:
    """The configuration that `shape` (config.json's content) describes; `defaults` fill what it leaves out.

    Raises:
        ConfigError: transformers knows no such model_type or key, or refuses a value.
    """
    options = {**defaults, **shape}
    model_type = str(options.pop("model_type"))
    try:
        config = AutoConfig.for_model(model_type, **options)
    except (StrictDataclassError, TypeError, ValueError) as error:
        known = list(_model_types())
        hint = "" if model_type in known else did_you_mean(model_type, known)
        text = " ".join(str(error).split())
        raise ConfigError(f"transformers can't build this: {text[:300]}.", where=where, hint=hint) from error
    known = [field.name for field in dataclasses.fields(config)] + list(config.attribute_map)
    for key in shape.keys() - set(known) - _OLD_KEYS - _UNDECLARED.get(model_type, set()):
        raise ConfigError(f"a {model_type} has no such key.", where=f"{where}.{key}", hint=did_you_mean(key, known))
    return config


def make_model(auto_class: Any, config: Any, **options: Any) -> nn.Module:
    """A model of this configuration with random weights, float32."""
    if not reads_weights():
        options.pop("attn_implementation", None)  # what never runs needs no kernel that may be missing here
    model: nn.Module = auto_class.from_config(config, dtype=torch.float32, **options)
    return model


def load_model(
    auto_class: Any, path: str, where: str, *, config: Any = None, holds_more: bool = False, **options: Any
) -> nn.Module:
    """A model with all its weights, float32; with its shapes alone inside `skeleton.without_weights`.

    Args:
        auto_class: of transformers.
        path: folder or hub id.
        where: the key that says so.
        config: the model's, where it is not quite the one at `path`.
        holds_more: the model is a part of what is at `path`, whose other tensors are nobody's concern.
        options: of `from_pretrained`.

    Raises:
        CheckpointError: there are no weights, or they do not fit the model.
    """
    if not reads_weights():
        return make_model(auto_class, config or read_config(path, where), **options)
    with explained(path, where), quiet(), _one_by_one():
        if original := qwen_folder.find(path):
            return qwen_folder.load_model(auto_class, original, config or read_config(path, where), where, **options)
        if config is not None:
            options["config"] = config
        _require(path, ["config.json"], "is no model: it has no config.json")
        model, info = auto_class.from_pretrained(
            os.path.expanduser(path),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are listed below; transformers only counts them
            trust_remote_code=False,
            **options,
        )
    _check_fit(type(model).__name__, info, path, where, holds_more=holds_more)
    loaded: nn.Module = model
    return loaded


def _check_fit(model: str, info: Mapping[str, Any], path: str, where: str, *, holds_more: bool) -> None:
    shapes = [f"{key} is {tuple(given)}, not {tuple(own)}" for key, given, own in info["mismatched_keys"]]
    missing = set(info["missing_keys"]) - {key for key, _, _ in info["mismatched_keys"]}
    findings = [
        f"{what} {len(names)} tensors: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (
            ("lack", missing),
            ("hold, and it has no place for,", [] if holds_more else info["unexpected_keys"]),
            ("have other shapes of", shapes),
        )
        if names
    ]
    if findings:
        raise CheckpointError(
            f"the weights at {path} do not fit a {model}. They {'; they '.join(findings)}.",
            where=where,
            hint="Are they of another architecture?",
        )


def load_tokenizer(path: str, where: str) -> Any:
    """The tokenizer at a folder or hub id.

    Raises:
        CheckpointError: there is none.
    """
    with explained(path, where), quiet():
        original = qwen_folder.find(path)
        if original and (original / qwen_tokenizer.FILE).is_file():
            return qwen_tokenizer.qwen_tokenizer(original)
        _require(path, _TOKENIZER_FILES, "has no tokenizer files")
        tokenizer: Any = AutoTokenizer.from_pretrained(os.path.expanduser(path), trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise CheckpointError(f"there are no tokenizer files at {path}.", where=where)
    return tokenizer


def _require(path: str, names: Sequence[str], otherwise: str) -> None:
    """Refuse a folder that has none of the files, which transformers would take for a hub id or for an empty tokenizer.

    Raises:
        OSError: see `explained`.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() and not any(found for name in names for found in folder.glob(name)):
        raise OSError(f"it {otherwise}.")


@contextlib.contextmanager
def explained(path: str, where: str) -> Iterator[None]:
    """Turn what transformers raises for a bad `path` into one sentence.

    Raises:
        CheckpointError: see the text.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs Python code of its own, which is never run; only models that transformers has work."
        if os.path.isdir(os.path.expanduser(path)):
            raise CheckpointError(f"the folder {path} can't be loaded: {reason[:300]}", where=where) from error
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise CheckpointError("there is no such folder.", where=where, given=path) from error
        raise CheckpointError(
            f"{path!r} is no folder here and can't be loaded from the Hugging Face hub: {reason[:300]}",
            where=where,
            hint="Without internet, download it elsewhere (hf download) and give the folder.",
        ) from error


@contextlib.contextmanager
def _one_by_one() -> Iterator[None]:
    """Where models are built in shares, transformers reads no tensor before the one ahead has been cut up.

    By default its threads read ahead as fast as they can, up to the whole model.
    """
    key = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(key)
    if shares.is_active():
        os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own load reports and progress bars (one a rank); what matters is checked here."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _model_types() -> Iterator[str]:
    from transformers import CONFIG_MAPPING

    yield from CONFIG_MAPPING.keys()
