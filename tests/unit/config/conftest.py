"""A configuration file as small as it can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lavis_ds import registry

Write = Callable[..., Path]


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test registers is forgotten afterwards."""
    for parts in registry.KINDS.values():
        monkeypatch.setattr(parts, "_entries", dict(parts._entries))
        monkeypatch.setattr(parts, "_classes", dict(parts._classes))


@pytest.fixture
def tree() -> dict[str, Any]:
    """What a project's YAML holds."""
    return {
        "model": {
            "arch": "llava_qwen",
            "model_type": "tiny",
            "language": {"tokenizer": "some/tokenizer"},
        },
        "datasets": {"talk": {"builder": "llava_json", "annotations": {"train": "talk.json"}}},
        "run": {"max_steps": 10, "batch_size_train": 2},
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a tree as YAML and return the file."""

    def write_yaml(content: Any, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write_yaml
