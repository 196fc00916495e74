"""The wheel works outside the checkout: package, shipped configurations, type marker and command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROBE = """
import json, sys
import lavis_ds
from lavis_ds.config.load import configs_dir
from lavis_ds.registry import KINDS
heavy = sorted({"torch", "transformers", "deepspeed", "timm"} & set(sys.modules))
names = {kind: registry.names() for kind, registry in KINDS.items()}
print(json.dumps({"file": lavis_ds.__file__, "configs": str(configs_dir()), "heavy": heavy, "names": names}))
"""


def _run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, "--target", str(target), str(wheel)], folder)
    return target


def test_everything_of_the_package_and_nothing_else_is_installed(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        paths = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(root)) for path in paths}

    expected = files(ROOT / "lavis_ds") | {f"_configs/{name}" for name in files(ROOT / "configs")}
    assert files(installed / "lavis_ds") == expected
    assert "py.typed" in expected
    assert any(name.startswith("_configs/models/") for name in expected)
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"lavis_ds", "bin"}


def test_import_finds_the_shipped_configurations_and_loads_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    found = json.loads(_run([sys.executable, "-c", PROBE], tmp_path, PYTHONPATH=str(installed)))
    assert Path(found["file"]).is_relative_to(installed)
    assert Path(found["configs"]) == installed / "lavis_ds" / "_configs"
    assert found["heavy"] == []
    assert "vlm" in found["names"]["models"]


def test_command_lists_the_built_in_parts(installed: Path, tmp_path: Path) -> None:
    output = _run([str(installed / "bin" / "lavis-ds"), "list", "models"], tmp_path, PYTHONPATH=str(installed))
    assert "minigpt4qwen" in output
