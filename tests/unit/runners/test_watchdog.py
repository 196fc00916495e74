"""Who is said to have stalled, and when the thread acts. Whole runs that stall are in tests/multi."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lavis_ds.runners import watchdog
from lavis_ds.runners.collectives import Collective
from lavis_ds.runners.progress import Progress
from lavis_ds.runners.watchdog import Answer, Watchdog, verdict

FOLDER = Path("/runs/a/stalls/1")


def answer(rank: int, moves: int, doing: str = "updating the weights", in_collective: bool = False) -> Answer:
    return Answer(rank, f"host{rank}", 7, doing, moves, in_collective, (f"s{rank}", f"t{rank}"), f"stack of {rank}\n")


def text(answers: Sequence[Answer], world_size: int) -> str:
    return str(verdict(answers, world_size, 450, FOLDER))


def test_the_rank_that_is_behind_is_named_with_its_samples_and_stack() -> None:
    said = text([answer(0, 31), answer(1, 30, "micro-batch 1 of 2"), answer(2, 31)], 3)
    assert said.startswith(
        "step 7, rank 1 on host1: nothing moved for 450 s (micro-batch 1 of 2); the other ranks wait"
    )
    assert "samples s1, t1" in said
    assert said.endswith("stack of 1")
    assert str(FOLDER) in said
    assert "run.stall_timeout_s" in said


def test_at_the_same_place_it_is_the_rank_that_is_in_no_collective() -> None:
    said = text([answer(0, 30, in_collective=True), answer(1, 30), answer(2, 30, in_collective=True)], 3)
    assert said.startswith("step 7, rank 1 on host1: nothing moved")
    assert "the other ranks wait for it" in said


def test_a_rank_that_does_not_answer_is_the_one() -> None:
    said = text([answer(0, 31), answer(2, 31)], 4)
    assert said.startswith("step 7, rank 1, 3: nothing moved")
    assert "did not even answer" in said
    assert "s0" not in said
    many = text([answer(0, 31)], 20)
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8 and 11 more" in many


def test_all_ranks_at_one_place_and_a_single_rank() -> None:
    assert text([answer(0, 31), answer(1, 31)], 2).startswith("step 7, all 2 ranks: nothing moved for 450 s (updating")
    alone = text([answer(0, 31)], 1)
    assert alone.startswith("step 7, rank 0: nothing moved")
    assert "wait for it" not in alone


def with_calls(rank: int, moves: int, *names: str) -> Answer:
    calls = [Collective("0", n, name, "", "in f (a.py:1)", n < len(names), n) for n, name in enumerate(names, 1)]
    return Answer(**{**answer(rank, moves).__dict__, "calls": tuple(calls)})


STUCK = "nothing moved for 450 s (updating the weights)"


def test_the_operation_is_named() -> None:
    """Of kernels that run behind the CPU's back, only the record of calls tells who is behind."""
    said = text([with_calls(0, 31, "all_reduce", "barrier"), with_calls(1, 31, "all_reduce")], 2)
    assert said.startswith(f"step 7, rank 1 on host1: {STUCK}; the other ranks wait for it in call 2, barrier, called ")
    assert "called in f (a.py:1). Given: samples s1, t1." in said
    other = text([with_calls(0, 31, "all_reduce", "barrier"), with_calls(1, 31, "all_reduce", "broadcast")], 2)
    assert other.startswith(f"step 7, all 2 ranks: {STUCK}; not all ranks make the same calls: ")
    assert "as call 2, rank 0 is in barrier, called in f (a.py:1); rank 1 is in broadcast" in other
    silent = text([with_calls(0, 31, "all_reduce", "barrier")], 2)
    assert "did not even answer); the other ranks wait for it in barrier, called in f (a.py:1)." in silent
    same = text([with_calls(rank, 31, "all_reduce", "barrier") for rank in range(2)], 2)
    assert same.startswith(f"step 7, all 2 ranks: {STUCK}; it stands in barrier, ")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    return codes


def test_thread_ends_a_process_that_stands_still(
    tmp_path: Path, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("starting")
    with Watchdog(tmp_path, 0.2, progress):
        progress.await_data(1)
        time.sleep(0.5)
        assert not exits, "the first step may take any time"
        progress.await_data(2)
        deadline = time.monotonic() + 20
        while not exits and time.monotonic() < deadline:
            time.sleep(0.05)
    assert exits == [1]
    said = capfd.readouterr().err
    assert "error: step 2, rank 0: nothing moved for 0.2 s (waiting for data)" in said
    (stacks,) = tmp_path.glob("*/rank_00000.txt")
    assert "test_thread_ends_a_process_that_stands_still" in stacks.read_text()
    assert '"doing": "waiting for data"' in stacks.read_text()


def test_thread_leaves_a_run_alone_that_moves(tmp_path: Path, exits: list[int]) -> None:
    progress = Progress("starting")
    progress.await_data(1)
    with Watchdog(tmp_path, 1.0, progress):
        for step in range(2, 12):
            progress.await_data(step)
            time.sleep(0.12)
        progress.aside("saving a checkpoint", 6)
        time.sleep(1.4)
    assert not exits
    assert not list(tmp_path.iterdir())
