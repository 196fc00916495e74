"""Rules of the code base that neither ruff, mypy nor import-linter can see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lavis_ds.config.base import Config
from lavis_ds.registry import KINDS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "torchvision", "transformers", "deepspeed", "timm", "accelerate", "peft", "webdataset"}

READ_EVERY_OPTION = """
import json, sys
import lavis_ds.config.load
from lavis_ds.registry import KINDS
for registry in KINDS.values():
    for entry in registry:
        registry.config_class(entry.name)
print(json.dumps(sorted(sys.modules)))
"""

PARTS = [(kind, entry.name) for kind, registry in KINDS.items() for entry in registry]


def test_reading_every_option_of_every_part_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_EVERY_OPTION], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(json.loads(done.stdout)) == set()


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{kind}-{name}" for kind, name in PARTS])
def test_declared_part_exists_with_its_options(kind: str, name: str) -> None:
    registry = KINDS[kind]
    assert callable(registry.get(name))
    assert issubclass(registry.config_class(name), Config)


def test_every_option_has_a_description() -> None:
    classes = {KINDS[kind].config_class(name) for kind, name in PARTS}
    undocumented = sorted(
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, field in cls.model_fields.items()
        if not field.description and name not in {"name", "arch", "builder"}
    )
    assert undocumented == []


def test_no_file_without_a_job() -> None:
    """Nothing is called utils or common: a newcomer finds the file by its name."""
    paths = [path for folder in ("lavis_ds", "scripts", "projects") for path in (ROOT / folder).rglob("*.py")]
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert [str(path) for path in paths if vague & {path.stem, *path.relative_to(ROOT).parts}] == []
