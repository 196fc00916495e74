"""Ranks that stand still or raise, in whole runs: all ranks end in time, and the right one is named."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import RanksFailed, launch, run_ranks
from tests.tiny_project import make_project

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")
STALL_S = 3


def stall_on_rank_1(cfg: str, options: list[str], where: str) -> int:
    """A run of which rank 1 sleeps: for ever in step 3, or for a while where that is all right."""
    from lavis_ds.runners import train as train_module
    from lavis_ds.runners.launch import train
    from lavis_ds.tasks.instruct import InstructTask

    train_step, save, calls = InstructTask.train_step, train_module.TrainRunner._save, []

    def sleep_in_step(self: Any, forward: Any, batch: Any) -> Any:
        calls.append(batch)
        if os.environ["RANK"] == "1" and len(calls) == 1 and where == "elsewhere":
            time.sleep(2 * STALL_S)
        if os.environ["RANK"] == "1" and len(calls) == 3 and where == "step":
            time.sleep(600)
        return train_step(self, forward, batch)

    def sleep_in_save(self: Any) -> None:
        save(self)
        if where == "elsewhere":
            time.sleep(2 * STALL_S)

    InstructTask.train_step = sleep_in_step  # type: ignore[method-assign]
    train_module.TrainRunner._save = sleep_in_save  # type: ignore[method-assign]
    return train(cfg, options, job_id=where, resume=None)


def leave_out_on_rank_1(cfg: str, options: list[str], job_id: str = "left_out") -> int:
    """A run with a collective more in every step, which rank 1 leaves out in step 3."""
    import torch
    import torch.distributed as dist

    from lavis_ds.runners.launch import train
    from lavis_ds.tasks.instruct import InstructTask

    train_step, calls = InstructTask.train_step, []

    def meet(self: Any, forward: Any, batch: Any) -> Any:
        calls.append(batch)
        if not (os.environ["RANK"] == "1" and len(calls) == 3):
            _meet_all(dist, torch)
        return train_step(self, forward, batch)

    InstructTask.train_step = meet  # type: ignore[method-assign]
    return train(cfg, options, job_id=job_id, resume=None)


def _meet_all(dist: Any, torch: Any) -> None:
    """What hangs with any other call: gloo ends with an error where only sizes differ, NCCL may go on with noise."""
    if torch.cuda.is_available():
        dist.all_reduce(torch.zeros(2**26, device="cuda"))
    else:
        dist.barrier()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    return make_project(folder, max_steps=4, save_every=2, batch_size_train=4, stall_timeout_s=STALL_S)


def test_a_rank_that_sleeps_ends_the_run_and_is_named(project: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(stall_on_rank_1, 2, str(project), [], "step", timeout_s=90, join_group=False)
    assert time.monotonic() - started < 60
    said = str(caught.value)
    assert said.count("error: step 3, rank 1 on ") == 1
    waits = f"nothing moved for {STALL_S} s (micro-batch 1 of 1); the other ranks wait for it in call "
    assert waits in said
    operation = said.partition(waits)[2].splitlines()[0]
    where = r"called in __init__ \(lavis_ds/runners/meter\.py:\d+\)"  # the losses; on a GPU, a gradient
    assert re.match(rf"\d+, all_?reduce of 3 Double, {where}\. Given: ", operation)
    assert "in sleep_in_step" in said, "the stack of the rank that sleeps"
    stacks = sorted((project.parent / "output" / "step" / "stalls").glob("*/rank_*.txt"))
    assert [path.name for path in stacks] == ["rank_00000.txt", "rank_00001.txt"]
    header = json.loads(stacks[1].read_text().splitlines()[0])
    assert len(header["samples"]) == 4
    assert ", ".join(header["samples"]) in said
    assert "exit code 1" in said


def test_a_rank_that_leaves_out_a_collective_is_named_with_the_operation(project: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(leave_out_on_rank_1, 2, str(project), [], timeout_s=90, join_group=False)
    assert seconds_of_stall(project, "left_out") < STALL_S + 10
    assert_named(str(caught.value), "barrier")


def seconds_of_stall(project: Path, job_id: str) -> float:
    """From the last step that was finished to the answer of the last rank."""
    folder = project.parent / "output" / job_id
    answers = list((folder / "stalls").glob("*/rank_*.txt"))
    assert len(answers) == 2
    return max(path.stat().st_mtime for path in answers) - (folder / "metrics.jsonl").stat().st_mtime


def assert_named(said: str, operation: str) -> None:
    """The error of `leave_out_on_rank_1`: its rank, what it left out, where it stands instead, and its samples."""
    assert said.count("error: step 3, rank 1 on ") == 1
    where = r"called in _meet_all \(tests/multi/test_stall\.py:\d+\)"
    left_out = rf"the other ranks wait for it in call \d+, {operation}, {where}; it stands in \w+ of .*, called in "
    other = rf"not all ranks make the same calls: as call \d+, rank 0 is in {operation}, {where}; rank 1 is in \w+ of "
    assert re.search(f"{left_out}|{other}", said)  # the former where the two calls are of different process groups
    assert re.search(r"\. Given: samples (\S+, ){3}\S+\. The stacks", said)


@pytest.mark.slow
def test_the_first_step_and_saving_may_take_longer(project: Path) -> None:
    assert run_ranks(stall_on_rank_1, 2, str(project), [], "elsewhere", timeout_s=90, join_group=False) == [0, 0]


RAISING = """
import os
from lavis_ds import registry
from lavis_ds.tasks.instruct import InstructTask


@registry.register_task("raising")
class RaisingTask(InstructTask):
    calls = 0

    def train_step(self, forward, batch):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            raise ZeroDivisionError("the pixels are gone")
        return super().train_step(forward, batch)
"""


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_rank_that_raises_ends_all_and_its_traceback_is_shown_once(launcher: Any, tmp_path: Path) -> None:
    project = make_project(tmp_path, max_steps=100000, save_every=None)
    (tmp_path / "raising.py").write_text(RAISING)
    options = [f"plugins=[{tmp_path / 'raising.py'}]", "run.task=raising"]
    command = [TRAIN, "--cfg", str(project), "--job-id", "a", "--options", *options]
    done = launch(command, num_ranks=2, launcher=launcher, timeout_s=120)
    assert done.returncode != 0
    assert done.stderr.count("ZeroDivisionError: the pixels are gone") == 1
    assert "[rank 1] Traceback (most recent call last):" in done.stderr
    assert done.stderr.count("train_step") >= 1
    assert "[rank 0] Traceback" not in done.stderr
