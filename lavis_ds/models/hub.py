"""Configurations, weights and tokenizers of Hugging Face, by folder, hub id or shape; failures in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as hf_logging

from lavis_ds.errors import CheckpointError, ConfigError, did_you_mean
from lavis_ds.models.skeleton import reads_weights

_OLD_KEYS = {"model_type", "architectures", "torch_dtype", "transformers_version", "rope_theta", "rope_scaling"}


def read_config(path: str, where: str) -> Any:
    """The model configuration at a folder or hub id.

    Raises:
        CheckpointError: there is nothing, or no model.
    """
    with explained(path, where), quiet():
        return AutoConfig.from_pretrained(os.path.expanduser(path))


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
    for key in shape.keys() - set(known) - _OLD_KEYS:
        raise ConfigError(f"a {model_type} has no such key.", where=f"{where}.{key}", hint=did_you_mean(key, known))
    return config


def make_model(auto_class: Any, config: Any, **options: Any) -> nn.Module:
    """A model of this configuration with random weights, float32."""
    if not reads_weights():
        options.pop("attn_implementation", None)  # what never runs needs no kernel that may be missing here
    model: nn.Module = auto_class.from_config(config, dtype=torch.float32, **options)
    return model


def load_model(auto_class: Any, path: str, where: str, *, config: Any = None, **options: Any) -> nn.Module:
    """A model with all its weights, float32; with its shapes alone inside `skeleton.without_weights`.

    Raises:
        CheckpointError: there are no weights, or they do not cover the model.
    """
    if not reads_weights():
        return make_model(auto_class, config or read_config(path, where), **options)
    if config is not None:
        options["config"] = config
    with explained(path, where), quiet():
        model, info = auto_class.from_pretrained(
            os.path.expanduser(path), dtype=torch.float32, output_loading_info=True, **options
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"the weights at {path} lack {len(missing)} tensors of a {type(model).__name__}: {', '.join(missing[:3])}"
            f"{', ...' if missing[3:] else ''}.",
            where=where,
            hint="Are they of another architecture?",
        )
    loaded: nn.Module = model
    return loaded


def load_tokenizer(path: str, where: str) -> Any:
    """The tokenizer at a folder or hub id.

    Raises:
        CheckpointError: there is none.
    """
    with explained(path, where), quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(os.path.expanduser(path))
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without its files
        raise CheckpointError(f"there are no tokenizer files at {path}.", where=where)
    return tokenizer


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
