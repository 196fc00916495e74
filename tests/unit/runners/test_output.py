"""A result that can't be written is refused before the work that would make it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lavis_ds.cli import main
from lavis_ds.errors import ConfigError
from lavis_ds.runners import preflight
from lavis_ds.runners.data_tools import reading
from lavis_ds.runners.output import require_file, require_folder
from tests.unit.runners.conftest import TinyRun

Capture = pytest.CaptureFixture[str]


def test_what_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.json"
    require_file(file, "--output")
    assert list(file.parent.iterdir()) == []
    file.write_text("old")
    require_file(file, "--output")
    assert file.read_text() == "old"
    require_folder(tmp_path / "b" / "c", "--to")
    assert list((tmp_path / "b" / "c").iterdir()) == []


@pytest.mark.parametrize("require", [require_file, require_folder])
def test_below_a_file_nothing_can_be_written(require: Callable[[Path, str], None], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--to: the result can't be written \(.*\)\. Given: .*file/a"):
        require(tmp_path / "file" / "a", "--to")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands must not come to where annotations or runs are read."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(preflight, "read", fail)
    monkeypatch.setattr(reading, "read", fail)
    monkeypatch.setattr("lavis_ds.runners.report.read_run", fail)
    monkeypatch.setattr("lavis_ds.runners.export.export._opened", fail)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("taken", ["eval", "eval/val_step_00000006.json", "eval/val_step_00000006.jsonl"])
def test_an_evaluation_does_not_begin(taken: str, tiny_run: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.folder, run)
    shutil.rmtree(run / "eval")
    if taken == "eval":
        (run / taken).touch()
    else:
        (run / taken).mkdir(parents=True)
    assert main(["evaluate", "--checkpoint", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert "the run folder of --checkpoint: the result can't be written" in said
    assert f"{run}/eval/val_step_00000006.json" in said


@pytest.mark.usefixtures("no_work")
def test_other_commands_do_not_begin(tiny_run: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    place, cfg = str(tmp_path / "file" / "below"), str(tiny_run.cfg)
    commands = {
        "--to": [
            ["export", "--checkpoint", str(tiny_run.folder), "--to", place],
            ["data", "shard", "--cfg", cfg, "--to", place],
        ],
        "--html": [["data", "inspect", "--cfg", cfg, "--html", place]],
        "--output": [["report", str(tiny_run.folder), "--output", place]],
    }
    for option, calls in commands.items():
        for call in calls:
            assert main(call) == 2, call
            said = capsys.readouterr().err
            assert f"error: {option}: the result can't be written" in said
            assert place.removesuffix("/below") in said
