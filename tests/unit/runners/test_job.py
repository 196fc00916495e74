"""Every case of `--resume`, `--job-id` and `run.resume_ckpt_path`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.runners import job

Make = Callable[..., Path]
TIME_STAMP = re.compile(r"\d{8}_\d{6}")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def config(output: Path, resume_ckpt_path: Path | None = None) -> RootConfig:
    run = {"max_steps": 1, "batch_size_train": 1, "output_dir": str(output)}
    if resume_ckpt_path is not None:
        run["resume_ckpt_path"] = str(resume_ckpt_path)
    model = {
        "arch": "vlm",
        "vision": "timm_vit",
        "projector": "mlp",
        "language": {"name": "hf_causal_lm", "path": "some/model"},
    }
    return decode(RootConfig, {"model": model, "datasets": {"a": {"builder": "llava_json"}}, "run": run})


@pytest.fixture
def make_run(output: Path, make_checkpoint: Make) -> Callable[..., Path]:
    """A run folder with checkpoints, `age_s` old."""

    def make(name: str, *steps: int, age_s: float = 0) -> Path:
        folder = output / name
        (folder / "checkpoints").mkdir(parents=True)
        for step in steps:
            make_checkpoint(folder / "checkpoints", step)
        (folder / "config.yaml").touch()
        os.utime(folder / "config.yaml", (1e9 - age_s, 1e9 - age_s))
        return folder

    return make


def truncate(checkpoint: Path) -> None:
    (checkpoint / "optimizer" / "shard.pt").write_bytes(b"")


# Without --resume


def test_a_new_run_gets_a_time_stamp(output: Path) -> None:
    chosen = job.resolve(config(output), job_id=None, resume=None)
    assert chosen.folder.parent == output
    assert TIME_STAMP.fullmatch(chosen.folder.name)
    assert (chosen.resume_from, chosen.notices) == (None, ())


@pytest.mark.parametrize("resume", [None, "none"])
def test_a_new_run_gets_its_name(resume: str | None, output: Path) -> None:
    assert job.resolve(config(output), job_id="mine", resume=resume) == job.Job(output / "mine")


@pytest.mark.parametrize("resume", [None, "none"])
def test_a_new_run_does_not_overwrite_checkpoints(resume: str | None, output: Path, make_run: Make) -> None:
    make_run("mine", 4)
    with pytest.raises(ConfigError, match=r"already holds checkpoints.*--resume auto"):
        job.resolve(config(output), job_id="mine", resume=resume)


def test_a_run_folder_without_checkpoints_is_used_again(output: Path, make_run: Make) -> None:
    make_run("mine")
    assert job.resolve(config(output), job_id="mine", resume=None).folder == output / "mine"


# --resume auto


def test_auto_without_earlier_runs_starts_anew_and_says_so(output: Path) -> None:
    chosen = job.resolve(config(output), job_id=None, resume="auto")
    assert TIME_STAMP.fullmatch(chosen.folder.name)
    assert chosen.resume_from is None
    assert "no earlier run" in chosen.notices[0]


def test_auto_takes_the_newest_run(output: Path, make_run: Make) -> None:
    make_run("z", 8, age_s=100)
    newest = make_run("a", 2, 4)
    chosen = job.resolve(config(output), job_id=None, resume="auto")
    assert (chosen.folder, chosen.resume_from) == (newest, newest / "checkpoints" / "step_00000004")
    assert "continuing from" in chosen.notices[-1]


def test_auto_with_a_name_takes_that_run(output: Path, make_run: Make) -> None:
    old = make_run("old", 8, age_s=100)
    make_run("new", 2)
    assert job.resolve(config(output), job_id="old", resume="auto").resume_from == old / "checkpoints/step_00000008"


def test_auto_with_a_new_name_starts_anew(output: Path, make_run: Make) -> None:
    make_run("other", 8)
    chosen = job.resolve(config(output), job_id="mine", resume="auto")
    assert (chosen.folder, chosen.resume_from) == (output / "mine", None)
    assert "no complete checkpoint" in chosen.notices[-1]


def test_auto_passes_over_a_damaged_one_and_says_so(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4, 8)
    truncate(folder / "checkpoints" / "step_00000008")
    chosen = job.resolve(config(output), job_id="mine", resume="auto")
    assert chosen.resume_from == folder / "checkpoints" / "step_00000004"
    assert "passed over" in chosen.notices[0]
    assert "step_00000008" in chosen.notices[0]


def test_auto_goes_before_resume_ckpt_path(output: Path, make_run: Make) -> None:
    mine, other = make_run("mine", 4), make_run("other", 8)
    chosen = job.resolve(config(output, other / "checkpoints" / "step_00000008"), job_id="mine", resume="auto")
    assert chosen.resume_from == mine / "checkpoints" / "step_00000004"


# --resume DIR and run.resume_ckpt_path


@pytest.mark.parametrize("inner", ["", "checkpoints", "checkpoints/step_00000004"])
@pytest.mark.parametrize("by_option", [True, False])
def test_a_folder_is_named(by_option: bool, inner: str, output: Path, make_run: Make) -> None:
    """The run folder, its `checkpoints`, or the checkpoint itself; the run goes on in its own folder."""
    folder = make_run("mine", 2, 4)
    if by_option:
        chosen = job.resolve(config(output), job_id=None, resume=str(folder / inner))
    else:
        chosen = job.resolve(config(output, folder / inner), job_id=None, resume=None)
    assert chosen == job.Job(folder, folder / "checkpoints" / "step_00000004")


def test_a_relative_folder_is_named(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4)  # the working directory is the folder that holds `output`
    assert job.resolve(config(output), job_id=None, resume="output/mine").folder == folder


def test_a_folder_and_a_name_branch_off(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4)
    chosen = job.resolve(config(output), job_id="branch", resume=str(folder))
    assert (chosen.folder, chosen.resume_from) == (output / "branch", folder / "checkpoints" / "step_00000004")


def test_a_checkpoint_of_elsewhere_gets_a_run_folder_here(tmp_path: Path, output: Path, make_checkpoint: Make) -> None:
    path = make_checkpoint(tmp_path / "elsewhere" / "checkpoints", 4)
    chosen = job.resolve(config(output), job_id=None, resume=str(path))
    assert TIME_STAMP.fullmatch(chosen.folder.name)
    assert (chosen.folder.parent, chosen.resume_from) == (output, path)


def test_resume_goes_before_resume_ckpt_path(output: Path, make_run: Make) -> None:
    one, other = make_run("one", 4), make_run("other", 8)
    assert job.resolve(config(output, other), job_id=None, resume=str(one)).folder == one


def test_none_switches_resume_ckpt_path_off(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4)
    assert job.resolve(config(output, folder), job_id="new", resume="none") == job.Job(output / "new")


def test_a_damaged_newest_one_is_passed_over_and_named(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4, 8)
    truncate(folder / "checkpoints" / "step_00000008")
    chosen = job.resolve(config(output), job_id=None, resume=str(folder))
    assert chosen.resume_from == folder / "checkpoints" / "step_00000004"
    assert len(chosen.notices) == 1
    assert re.search(r"passed over: .*step_00000008/optimizer/shard\.pt", chosen.notices[0])


def test_a_damaged_one_that_is_named_itself_is_refused(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4, 8)
    truncate(folder / "checkpoints" / "step_00000008")
    with pytest.raises(CheckpointError, match=r"has changed since.*Complete ones beside it: step_00000004"):
        job.resolve(config(output), job_id=None, resume=str(folder / "checkpoints" / "step_00000008"))


def test_a_run_with_damaged_ones_only_is_refused_with_the_reason(output: Path, make_run: Make) -> None:
    folder = make_run("mine", 4)
    truncate(folder / "checkpoints" / "step_00000004")
    with pytest.raises(CheckpointError, match=r"no checkpoint in this folder is complete.*shard\.pt.*has changed"):
        job.resolve(config(output), job_id=None, resume=str(folder))


@pytest.mark.parametrize("by_option", [True, False])
def test_a_folder_that_is_none(by_option: bool, output: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(CheckpointError, match=r"absent: there is no such checkpoint folder"):
        job.resolve(
            config(output, None if by_option else absent), job_id=None, resume=str(absent) if by_option else None
        )


def test_an_empty_run_folder_holds_none(output: Path, make_run: Make) -> None:
    with pytest.raises(CheckpointError, match="not finished"):
        job.resolve(config(output), job_id=None, resume=str(make_run("mine")))


# The folder


def test_notices_are_put_in_front(output: Path) -> None:
    assert job.Job(output, None, ("b",)).with_notices(["a"]).notices == ("a", "b")


def test_make_folder(output: Path) -> None:
    chosen = job.Job(output / "mine")
    job.make_folder(chosen)
    job.make_folder(chosen)
    assert [p.name for p in chosen.folder.iterdir()] == ["checkpoints"]


def test_a_folder_that_cannot_be_made(output: Path) -> None:
    output.write_text("a file")
    with pytest.raises(ConfigError, match=r"run\.output_dir: the run folder can't be written"):
        job.make_folder(job.Job(output / "mine"))


def test_going_back_in_the_same_run_folder_is_refused(output: Path, make_run: Callable[..., Path]) -> None:
    """The later checkpoints would be overwritten, or be taken for this run's by the next `--resume auto`."""
    earlier = make_run("run", 4, 8) / "checkpoints" / "step_00000004"
    with pytest.raises(ConfigError, match=r"later checkpoints.*another --job-id"):
        job.resolve(config(output), job_id=None, resume=str(earlier))
    assert job.resolve(config(output), job_id="branch", resume=str(earlier)).resume_from == earlier
