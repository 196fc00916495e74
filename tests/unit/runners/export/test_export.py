"""The command: one run through everything with a process of its own, and what it refuses."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lavis_ds.cli import main
from lavis_ds.errors import CheckpointError
from lavis_ds.runners.export import check, shards
from tests.unit.runners.export.conftest import Tree

Exported = Callable[..., Any]


def test_the_command_reloads_in_a_process_of_its_own(
    tree: Tree, make_checkpoint: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_checkpoint(tree)
    assert main(["export", "--checkpoint", str(run), "--to", str(tmp_path / "out")]) == 0
    said = capfd.readouterr().out
    assert "LlavaForConditionalGeneration" in said
    assert "picture and text: logits differ by at most" in said
    assert not (tmp_path / ".partial_out").exists()
    assert main(["export", "--checkpoint", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "no empty folder" in capfd.readouterr().err


def test_a_process_that_fails(
    tree: Tree, make_checkpoint: Callable[..., Path], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.sys, "executable", shutil.which("false"))
    assert main(["export", "--run", str(make_checkpoint(tree)), "--output", str(tmp_path / "out")]) == 2
    assert "can't load the exported folder" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_logits_are_an_error(
    tree: Tree, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = shards.Writer._made

    def disturbed(self: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in usual(self, name):
            yield key, tensor * 1.001 if key.endswith("linear_2.weight") else tensor

    monkeypatch.setattr(shards.Writer, "_made", disturbed)
    with pytest.raises(CheckpointError, match="computes something else"):
        exported(tree)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".partial_out").is_dir()


def test_a_lost_tensor_is_an_error(tree: Tree, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = shards.Writer._made
    monkeypatch.setattr(shards.Writer, "_made", lambda self, name: () if "lm_head" in name else usual(self, name))
    with pytest.raises(CheckpointError, match="missing_keys"):
        exported(tree)


def test_no_room(tree: Tree, exported: Exported, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(Exception, match="the disk has no room"):
        exported(tree)
    assert not list(tmp_path.glob(".partial*"))


def test_without_the_check(
    tree: Tree, make_checkpoint: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", "--checkpoint", str(make_checkpoint(tree)), "--to", str(tmp_path / "a" / "out")]
    assert main([*arguments, "--skip-check", "--dtype", "bfloat16"]) == 0
    assert "not loaded and not compared" in capfd.readouterr().out
    assert (tmp_path / "a" / "out" / "config.json").is_file()


def test_a_run_without_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--checkpoint", str(tmp_path / "nothing"), "--to", str(tmp_path / "out")]) == 2
    assert "no such checkpoint" in capfd.readouterr().err
