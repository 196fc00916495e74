"""`environment.json`: what a run ran on."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.runners import environment


def written(folder: Path) -> dict[str, Any]:
    environment.write(folder / "environment.json", {"engine": "torch"}, {"a": 3})
    content: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return content


def test_versions_layout_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PACKAGES", ("torch", "surely-absent-xyz"))
    content = written(tmp_path)
    torch_version = content["packages"].pop("torch")
    assert torch_version[0].isdigit()
    assert content["packages"] == {"surely-absent-xyz": None}
    assert (content["python"], content["command"]) == (platform.python_version(), sys.argv)
    assert (content["samples"], content["layout"]) == ({"a": 3}, {"engine": "torch"})


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert written(tmp_path)["git"] is None


def test_commit_and_changes_of_the_working_directory(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    assert environment._git() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").touch()
    assert environment._git() == {"commit": git("rev-parse", "HEAD"), "dirty": True}
