"""The starters of multi-process tests do what the tests rely on: results, errors, time-outs, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.multi.launch import RanksFailed, launch, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, float, int, int]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads(), threading.active_count()


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the pixels are gone")
    dist.barrier()


def _die_on_rank_0() -> None:
    print("about to die", flush=True)
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_1(pid_file: Path) -> None:
    print(f"rank {dist.get_rank()} is here", flush=True)
    if dist.get_rank() == 1:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        pid_file.write_text(str(sleeper.pid))
        time.sleep(300)
    dist.barrier()


def _environment() -> tuple[str, str, bool]:
    return os.environ["RANK"], os.environ["MASTER_PORT"], dist.is_initialized()


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_ranks_return_their_results_in_order() -> None:
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21.0, 1, 1), (1, 21.0, 1, 1)]


def test_without_group_the_environment_is_that_of_a_launcher() -> None:
    (rank_0, port_0, joined_0), (rank_1, port_1, joined_1) = run_ranks(_environment, 2, join_group=False)
    assert (rank_0, rank_1, joined_0, joined_1) == ("0", "1", False, False)
    assert port_0 == port_1


def test_rank_that_raises_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="rank 1 raised") as caught:
        run_ranks(_raise_on_rank_1, 2)
    text = str(caught.value)
    assert text.startswith("rank 1"), "the first to fail comes first"
    assert "ValueError: the pixels are gone" in text
    assert "in _raise_on_rank_1" in text


def test_rank_that_dies_fails_the_test_with_its_exit_code_and_output() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 died with exit code 7; its last output:\nabout to die"):
        run_ranks(_die_on_rank_0, 2)


def test_rank_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 was still running") as caught:
        run_ranks(_hang_on_rank_1, 2, tmp_path / "pid", timeout_s=8)
    assert time.monotonic() - start < 30
    assert "rank 1 is here" in str(caught.value)
    assert "in _hang_on_rank_1" in str(caught.value), "the stack shows where it hung"
    assert not _is_running(int((tmp_path / "pid").read_text()))


RANK_SCRIPT = """
import argparse, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int)
parser.add_argument("folder")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()
folder, rank, world_size = pathlib.Path(args.folder), os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
print(f"rank {rank} of {world_size}")
(folder / f"{rank}.pid").write_text(str(os.getpid()))
while args.hang or len(list(folder.glob("*.pid"))) < int(world_size):  # the launcher ends the others once one has ended
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "rank.py"
    path.write_text(RANK_SCRIPT)
    return str(path)


def test_python_returns_exit_code_and_output(script: str, tmp_path: Path) -> None:
    run = launch([script, str(tmp_path)], launcher="python", env={"RANK": "7"})
    assert (run.returncode, run.stdout) == (3, "rank 7 of 1\n")


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers_start_every_rank(launcher: str, script: str, tmp_path: Path) -> None:
    run = launch([script, str(tmp_path)], num_ranks=2, launcher=launcher)  # type: ignore[arg-type]
    assert run.returncode != 0
    assert "rank 0 of 2" in run.stdout
    assert "rank 1 of 2" in run.stdout


def test_launched_ranks_that_hang_are_killed(script: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="still running after 20 s and killed") as caught:
        launch([script, str(tmp_path), "--hang"], num_ranks=2, timeout_s=20)
    assert "rank 1 of 2" in str(caught.value)
    assert "rank.py" in str(caught.value), "the stack shows where it hung"
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not any(_is_running(pid) for pid in pids)
