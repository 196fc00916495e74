"""Whatever breaks, all ranks end with one clear error or go on alike, and the next start continues the same run.

Ranks that die at random moments are in `test_kills`, those that stall or raise in `test_stall`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lavis_ds.runners.checkpoint_files import complete_ones
from tests.multi import faults
from tests.multi.launch import RanksFailed, launch, run_ranks
from tests.multi.test_resume import what_matters
from tests.multi.test_same_loss import ZERO
from tests.tiny_project import make_project, metrics

STEPS = 8
TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")
OPTIONS = [ZERO[2], "run.dist_timeout_s=60"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    return make_project(
        folder, max_steps=STEPS, save_every=2, keep_last=1, valid_splits=["val"], eval_every=3, warmup_steps=0
    )


@pytest.fixture(scope="module")
def whole(project: Path) -> Path:
    """The run folder of a run that nothing happens to; it keeps all its checkpoints."""
    codes = run(project, "whole", ["run.keep_last=9"])
    assert [code for code, _ in codes] == [0, 0]
    return project.parent / "output" / "whole"


def run(
    project: Path, job: str, options: list[str], fault: faults.Fault = faults.none, resume: str | None = "auto"
) -> list[tuple[int, str]]:
    """Exit code and standard error of two ranks."""
    arguments = (str(project), job, [*OPTIONS, *options], resume, fault)
    return run_ranks(faults.command, 2, *arguments, timeout_s=90, join_group=False)


def steps_of(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of a run."""
    return [int(path.name.removeprefix("step_")) for path in complete_ones(folder / "checkpoints")]


def weights(folder: Path, step: int = STEPS) -> bytes:
    return (folder / "checkpoints" / f"step_{step:08d}" / "weights" / "model.safetensors").read_bytes()


def assert_goes_on(project: Path, folder: Path, options: list[str], whole: Path) -> None:
    """Started again, the run goes on after step 4 and ends as the one that nothing happened to."""
    before = lines(folder)
    assert [code for code, _ in run(project, folder.name, options)] == [0, 0]
    assert lines(folder)[:4] == before[:4], "with the seconds they took: these steps were not done again"
    assert not set(lines(folder)[4:]) & set(before)
    assert what_matters(metrics(folder)) == what_matters(metrics(whole))
    assert weights(folder) == weights(whole)


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


# ---- killed at a certain point ---------------------------------------------------------------------------------------

PLACES: list[tuple[faults.Fault, list[int]]] = [
    (faults.killed_in_evaluation, [2]),
    (faults.killed_in_a_shard, [2]),
    (faults.killed_before_the_mark, [2]),
    (faults.killed_in_a_removal, [4]),
]
"""And the steps of the checkpoints that are left, when all of them happen one after the other."""


def test_killed_in_evaluation_and_in_every_part_of_a_save(project: Path, whole: Path) -> None:
    folder = project.parent / "output" / "killed"
    for fault, left in PLACES:
        with pytest.raises(RanksFailed, match="died with exit code -9"):
            run(project, "killed", [], fault)
        assert steps_of(folder) == left, fault.__name__
    assert_goes_on(project, folder, [], whole)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["latest", f"step_{STEPS:08d}"]


def test_a_rename_that_takes_its_time_shows_no_half_checkpoint(project: Path, whole: Path) -> None:
    codes = run(project, "slow_rename", ["run.stop_at_step=6"], faults.renaming_file_by_file)
    assert [code for code, _ in codes] == [75, 75]
    assert steps_of(project.parent / "output" / "slow_rename") == [6]
    assert weights(project.parent / "output" / "slow_rename", 6) == weights(whole, 6)


# ---- disks -----------------------------------------------------------------------------------------------------------


def can_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not can_mount(), reason="may not mount file systems"
)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield tmp_path / "disk"


@needs_mount
@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_with_one_error_and_costs_nothing(
    behind: bool, project: Path, whole: Path, small_disk: Path
) -> None:
    options = [f"run.output_dir={small_disk}", f"run.save_in_background={behind}"]
    (code_0, said_0), (code_1, said_1) = run(project, "a", options, faults.disk_full_in_a_save)
    assert (code_0, code_1) == (1, 1)
    assert said_0.count("[rank 0] error: ") == 1
    assert "step_00000006, rank " in said_0
    assert "No space left on device" in said_0
    assert "make room, or mend the disk, and start again with --resume auto" in said_0
    assert "Traceback" not in said_0
    assert said_1 == "", "one rank tells it"
    assert steps_of(small_disk / "a") == [4]
    assert not list((small_disk / "a" / "checkpoints").glob(".partial*")), "half a checkpoint takes room that is needed"
    (small_disk / "ballast").unlink()
    assert_goes_on(project, small_disk / "a", options, whole)


@pytest.mark.slow
@needs_mount
def test_a_disk_too_full_for_a_line_of_metrics_is_told(project: Path, whole: Path, small_disk: Path) -> None:
    options = [f"run.output_dir={small_disk}"]
    (code_0, said_0), (code_1, said_1) = run(project, "a", options, faults.disk_full_before_a_line)
    assert (code_0, code_1) == (1, 1)
    assert f"error: {small_disk / 'a'}: the run can't write what it has to tell" in said_0
    assert "Traceback" not in said_0
    assert "ended, since another rank did" in said_1
    (small_disk / "ballast").unlink()
    assert_goes_on(project, small_disk / "a", options, whole)


@needs_mount
def test_an_output_folder_that_can_not_be_written_is_refused_at_once(project: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs"):
        command = [TRAIN, "--cfg", str(project), "--options", f"run.output_dir={tmp_path / 'disk'}"]
        done = launch(command, num_ranks=2, timeout_s=60)
    print(f"refused after {time.monotonic() - started:.1f} s")
    assert done.returncode != 0
    assert done.stderr.count("error: run.output_dir: the run folder can't be written") == 1
    assert "Read-only file system" in done.stderr
    assert time.monotonic() - started < 30


@needs_mount
def test_a_disk_that_becomes_read_only_ends_the_run_with_one_error(project: Path, whole: Path, tmp_path: Path) -> None:
    options, checkpoints = [f"run.output_dir={tmp_path}"], tmp_path / "a" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with mounted(checkpoints, "--bind", str(checkpoints)):
        (code_0, said_0), (code_1, said_1) = run(project, "a", options, faults.read_only_after_step_5)
        assert (code_0, code_1, said_1) == (1, 1, "")
        assert said_0.count("[rank 0] error: ") == 1
        assert "Read-only file system" in said_0
        assert "Traceback" not in said_0
        assert steps_of(tmp_path / "a") == [4]
    assert_goes_on(project, tmp_path / "a", options, whole)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_are_passed_over_by_all_ranks(project: Path, whole: Path) -> None:
    """The newest is cut off, the one before has a wrong bit in the second rank's shard; the third is taken."""
    folder = project.parent / "output" / "damaged"
    shutil.copytree(whole, folder)
    truncate(folder / "checkpoints" / "step_00000008" / "weights" / "model.safetensors")
    flip_a_bit(folder / "checkpoints" / "step_00000006" / "optimizer" / "rank_00001_00000.safetensors")
    assert_goes_on(project, folder, ["run.keep_last=9"], whole)


# ---- numbers that are not finite, on one rank ------------------------------------------------------------------------


def not_finite(project: Path, stage: int, policy: str) -> tuple[Path, list[tuple[int, str]]]:
    job = f"{policy}_{stage}"
    options = [ZERO[stage], f"run.on_non_finite={policy}", "run.max_steps=6", "run.valid_splits=[]"]
    return project.parent / "output" / job, run(project, job, options, faults.not_finite_on_rank_1)


def test_a_rank_whose_numbers_are_not_finite_is_left_out_by_all(project: Path, whole: Path) -> None:
    """Largest difference of losses between ZeRO-2 and ZeRO-3 seen: 5e-7."""
    losses = {}
    for stage in (2, 3):
        folder, results = not_finite(project, stage, "skip")
        assert [code for code, _ in results] == [0, 0]
        found = metrics(folder)
        assert [line["step"] for line in found if line["train/grad_norm"] == float("inf")] == [2, 4]
        assert [line["data/sample_ids"] for line in found] == [line["data/sample_ids"] for line in metrics(whole)[:6]]
        saved = load_file(folder / "checkpoints" / "step_00000006" / "weights" / "model.safetensors")
        assert all(tensor.isfinite().all() for tensor in saved.values())
        losses[stage] = [line["train/loss"] for line in found if line["step"] != 2]
    print("largest difference", max(abs(a - b) for a, b in zip(losses[2], losses[3], strict=True)))
    assert losses[3] == pytest.approx(losses[2], abs=1e-5)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_whose_numbers_are_not_finite_ends_the_run(stage: int, project: Path, whole: Path) -> None:
    folder, ((code_0, said_0), (code_1, said_1)) = not_finite(project, stage, "stop")
    assert (code_0, code_1, said_1) == (1, 1, ""), "one rank tells it"
    assert "error: step 2, rank 1: the loss is nan; the weights were not changed by this step." in said_0
    ids = metrics(whole)[1]["data/sample_ids"]
    named = [name for name in ids if f"{name}," in said_0 or f"{name}." in said_0]
    assert len(named) == len(ids) // 2, "those of rank 1"
    assert len(metrics(folder)) == 1


def test_a_rank_whose_numbers_are_not_finite_takes_all_back(project: Path, whole: Path) -> None:
    """To the checkpoint that is being written. Largest difference of losses between ZeRO-2 and ZeRO-3 seen: 0."""
    losses = {}
    for stage in (2, 3):
        job = f"rewind_{stage}"
        options = [ZERO[stage], "run.on_non_finite=rewind", "run.save_in_background=true", "run.keep_last=9"]
        fault = partial(faults.not_finite_on_rank_1, 5, 7)
        assert [code for code, _ in run(project, job, options, fault)] == [0, 0]
        folder = project.parent / "output" / job
        found = metrics(folder)
        assert [line.get("train/rewound_to") for line in found] == [None] * 4 + [4, None, 6, None]
        assert [line["data/sample_ids"] for line in found] == [line["data/sample_ids"] for line in metrics(whole)]
        assert steps_of(folder) == [2, 4, 6, 8]
        assert weights(folder, 4) == weights(whole, 4) or stage == 3
        state = json.loads((folder / "checkpoints" / "step_00000008" / "train_state.json").read_text())
        assert (state["rewinds"], state["steps_skipped"]) == ([[5, 4], [7, 6]], 2)
        losses[stage] = [line["train/loss"] for line in found if line["step"] != 5]
    print("largest difference", max(abs(a - b) for a, b in zip(losses[2], losses[3], strict=True)))
    assert losses[3] == pytest.approx(losses[2], abs=1e-5)


def test_all_ranks_end_when_it_is_too_often(project: Path) -> None:
    options = [ZERO[3], "run.on_non_finite=rewind", "run.max_rewinds=1"]
    fault = partial(faults.not_finite_on_rank_1, 3, 4)
    (code_0, said_0), (code_1, said_1) = run(project, "too_often", options, fault)
    assert (code_0, code_1, said_1) == (1, 1, ""), "one rank tells it"
    assert "the gradient norm is inf; the run has gone back 1 times already (run.max_rewinds)." in said_0


# ---- saving while an evaluation runs ---------------------------------------------------------------------------------


def test_what_is_written_beside_an_evaluation_is_what_was_there(project: Path) -> None:
    """Under ZeRO-3, where an evaluation gathers the very weights that are being written."""
    options = [ZERO[3], "run.save_every=1", "run.eval_every=1", "run.keep_last=9", "run.max_steps=4"]
    run(project, "at_once", options)
    behind = [*options, "run.save_in_background=true"]
    for code, said in run(project, "behind", behind, faults.writing_takes_longer_than_an_evaluation):
        assert code == 0
        for step in (1, 2, 3):
            assert f"checkpoint {step} is written after the evaluation of step {step + 1}" in said
    folders = [project.parent / "output" / name / "checkpoints" for name in ("at_once", "behind")]
    assert steps_of(folders[1].parent) == [1, 2, 3, 4]
    names = [path.relative_to(folders[0]) for path in folders[0].glob("*/*/*")]
    assert len(names) == 4 * 5, "two shards, the weights and two random states each"
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
