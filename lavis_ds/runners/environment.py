"""What a run ran on, for whoever has to repeat it: versions, project commit, hardware, launcher, data sizes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lavis_ds import distributed

_PACKAGES = ("lavis-ds", "torch", "deepspeed", "transformers", "timm", "accelerate", "omegaconf", "numpy", "flash-attn")


def write(path: Path, layout: dict[str, Any], dataset_sizes: dict[str, int]) -> None:
    """Write `environment.json`."""
    content = {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpus": _gpus()},
        "ranks": distributed.world_size(),
        "layout": layout,
        "samples": dataset_sizes,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git() -> dict[str, Any] | None:
    """Commit of the working directory's repository and whether it had changes; None outside one."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changes.strip())}
