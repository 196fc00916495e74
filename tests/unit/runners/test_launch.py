"""What the commands do before anything heavy: ranks of the launcher, and commands that it has started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from lavis_ds.cli import main
from lavis_ds.runners.launch import _after_restart
from tests.unit.runners.conftest import TinyRun


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_command_that_was_started_again_continues(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    assert _after_restart("a", None) is None
    assert _after_restart(None, None) is None
    monkeypatch.setenv(name, "1")
    assert _after_restart("a", None) == "auto"
    assert _after_restart(None, "auto") == "auto"
    assert _after_restart("a", "none") == "none"


def test_without_a_name_it_is_refused(
    tiny_run: TinyRun, process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert main(["train", "--cfg", str(tiny_run.cfg)]) == 2
    assert "does not say which run to go on with. Given: restart 2" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_launchers_that_contradict_each_other_are_refused_first(
    command: str, tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    nothing = ["--cfg", str(tmp_path / "no.yaml")] if command == "train" else ["--checkpoint", str(tmp_path / "none")]
    assert main([command, *nothing]) == 2
    assert "environment: RANK must be set" in capsys.readouterr().err
