"""A folder of the original Qwen (`model_type: qwen`), loaded as transformers' Qwen2 without its remote code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion import qwen, qwen_tokenizer
from lavis_ds.models.conversion.source import open_weights
from lavis_ds.models.conversion.stored import fill

_ON_THE_HUB = re.compile(r"qwen/qwen-(1_8b|7b|14b|72b)(-chat)?", re.IGNORECASE)
_FILES = ["*.json", "*.safetensors", qwen_tokenizer.FILE]


def find(path: str) -> Path | None:
    """The folder, downloaded first where `path` is one of the original's hub ids; None where it is of another model."""
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        return Path(snapshot_download(path, allow_patterns=_FILES)) if _ON_THE_HUB.fullmatch(path) else None
    if (folder / "config.json").is_file():
        return folder if _shape(folder).get("model_type") == "qwen" else None
    return folder if (folder / qwen_tokenizer.FILE).is_file() else None


def read_config(folder: Path, where: str) -> Any:
    """A Qwen2's configuration.

    Raises:
        ConfigError: the shape is one that Qwen2 has not.
    """
    config = qwen.qwen2_config(_shape(folder), where)
    return AutoConfig.for_model(config.pop("model_type"), **config)


def load_model(auto_class: Any, folder: Path, config: Any, where: str, **options: Any) -> nn.Module:
    """A Qwen2 with the folder's weights, float32, filled one tensor at a time.

    Raises:
        CheckpointError: the weights do not fit.
    """
    tensors = qwen.convert(open_weights(folder))
    with no_init_weights():
        model: nn.Module = auto_class.from_config(config, dtype=torch.float32, **options)
    own = model.state_dict(keep_vars=True)
    wrong = sorted(own.keys() ^ tensors.keys()) + sorted(
        name for name in own.keys() & tensors.keys() if tensors[name].shape != tuple(own[name].shape)
    )
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors are missing, unknown or of another shape than config.json says: "
            f"{', '.join(wrong[:3])}{', ...' if wrong[3:] else ''}.",
            where=where,
            given=str(folder),
        )
    for name, tensor in tensors.items():
        fill(own[name], tensor)
    return model


def _shape(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
