"""Two ways to start several processes in a test, both under a hard time-out that leaves nothing running.

`run_ranks` calls a function on every rank and is the fast one: the ranks are forked from a server process that has
imported the heavy libraries once. `launch` starts a command line the way a user does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import psutil

PRELOADED = ["torch", "torch.distributed", "torchvision", "transformers", "timm", "deepspeed", "lavis_ds"]
GRACE_S = 10.0
"""How long the other ranks may go on after one has failed."""

TAIL_LINES = 60
RUN_MARK = "LAVIS_DS_TEST_RUN"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
DEVICE = "LAVIS_DS_TEST_DEVICE"
"""Of the environment: `gpu` lets the tests of this folder use GPUs, `cpu` tries those of tests/gpu without any."""


class RanksFailed(AssertionError):  # noqa: N818  (reads as a sentence in a test)
    """A rank raised, died or hung. The text holds every rank's traceback or last output, the first to fail first."""


@dataclass(frozen=True)
class CompletedRun:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


# ---- functions -------------------------------------------------------------------------------------------------------


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    join_group: bool = True,
    cpu_only: bool = True,
) -> list[Any]:
    """What `function(*args)` returns on each of `world_size` ranks, by rank.

    Args:
        function: a function of a module (not a lambda or a local one); its arguments and its result are pickled.
        world_size: number of ranks.
        args: the same on every rank.
        timeout_s: after this every rank is killed and the test fails with each rank's stack and last output.
        cpu_only: hide GPUs from the ranks; what `DEVICE` says goes before it.
        join_group: form a gloo group first. Without it the ranks only have RANK, MASTER_PORT, ... in their environment.

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    cpu_only = is_cpu_only(cpu_only)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        ranks = [
            context.Process(
                target=_rank_main,
                args=(function, args, rank, world_size, folder, os.getcwd(), port, timeout_s, join_group, cpu_only),
                daemon=False,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            failures = _wait(ranks, folder, timeout_s)
        finally:
            for rank in ranks:
                _kill_group(rank)
        if failures:
            raise RanksFailed("\n\n".join(failures))
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def is_cpu_only(by_itself: bool) -> bool:
    """Whether ranks shall see no GPU."""
    chosen = os.environ.get(DEVICE)
    return by_itself if chosen is None else chosen == "cpu"


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: Path,
    working_directory: str,
    port: int,
    timeout_s: float,
    join_group: bool,
    cpu_only: bool,
) -> None:
    """Runs in the rank: own process group, output into files, result or traceback into files."""
    os.setsid()
    log = (folder / f"{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    os.chdir(working_directory)
    os.environ.update(
        CPU_ONLY if cpu_only else {},
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        if join_group:
            _join_group(rank, world_size, folder, timeout_s)
        result = function(*args)
        _write(folder / f"{rank}.result", pickle.dumps(result))
    except BaseException:
        _write(folder / f"{rank}.error", traceback.format_exc().encode())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _join_group(rank: int, world_size: int, folder: Path, timeout_s: float) -> None:
    import torch.distributed as dist

    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, timedelta(seconds=2 * timeout_s), world_size, rank)


def _write(path: Path, content: bytes) -> None:
    """In one step, so that the reader never sees half of it."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").rename(path)


def _wait(ranks: Sequence[BaseProcess], folder: Path, timeout_s: float) -> list[str]:
    """Texts about the ranks that failed, in the order in which they did; empty where all went well."""
    start, failed, deadline = time.monotonic(), list[int](), timeout_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() - start < deadline:
        time.sleep(0.02)
        for index, rank in enumerate(ranks):
            if index not in failed and ((folder / f"{index}.error").exists() or rank.exitcode not in (None, 0)):
                failed.append(index)
                deadline = min(deadline, time.monotonic() - start + GRACE_S)
    hung = [index for index, rank in enumerate(ranks) if rank.is_alive() and index not in failed]
    for index in hung:
        os.kill(_pid(ranks[index]), signal.SIGUSR1)  # writes the stack of every thread into the log
    if hung:
        time.sleep(0.3)
    return [_about(index, ranks[index], folder, time.monotonic() - start) for index in dict.fromkeys([*failed, *hung])]


def _about(index: int, rank: BaseProcess, folder: Path, waited_s: float) -> str:
    error, log = folder / f"{index}.error", folder / f"{index}.log"
    output = _tail(log.read_text(errors="replace")) if log.exists() else ""
    if error.exists():
        return f"rank {index} raised\n{error.read_text()}"
    if rank.exitcode is None:
        return f"rank {index} was still running after {waited_s:.0f} s and was killed; its last output:\n{output}"
    return f"rank {index} died with exit code {rank.exitcode}; its last output:\n{output}"


def _kill_group(rank: BaseProcess) -> None:
    """End the rank and whatever it started, such as data-loading workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(_pid(rank), signal.SIGKILL)
    rank.kill()  # for a rank that has not come as far as its own group
    rank.join()


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


# ---- command lines ---------------------------------------------------------------------------------------------------


def launch(
    args: Sequence[str],
    *,
    num_ranks: int = 1,
    launcher: Literal["torchrun", "deepspeed", "python"] = "torchrun",
    launcher_args: Sequence[str] = (),
    timeout_s: float = 180,
    env: Mapping[str, str] | None = None,
    device: Literal["cpu", "gpu"] = "cpu",
) -> CompletedRun:
    """Exit code and output of a Python script, started as a user would; a failing exit code is not an error here.

    Args:
        args: the script and its options.
        num_ranks: processes to start; 1 with `python`.
        launcher: what starts them.
        launcher_args: its further options.
        timeout_s: after this every process of the run is killed and the test fails with stacks and last output.
        env: additions to the environment.
        device: `cpu` hides the GPUs.

    Raises:
        RanksFailed: the run took longer than `timeout_s`.
    """
    port, mark = free_port(), uuid.uuid4().hex
    own = {RUN_MARK: mark, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    own |= CPU_ONLY if is_cpu_only(device == "cpu") else {}
    command = [*_launcher_command(launcher, num_ranks, port), *launcher_args, *args]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        environment = {**os.environ, **own, **(env or {})}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_marked(mark, signal.SIGABRT)  # faulthandler writes the stack of every thread
            time.sleep(0.5)
            kill_marked(mark, signal.SIGKILL)
            text = f"stdout:\n{_tail(_content(stdout))}\nstderr:\n{_tail(_content(stderr))}"
            what = f"still running after {timeout_s:.0f} s and killed: {' '.join(command)}"
            raise RanksFailed(f"{what}\n{text}") from None
        finally:
            kill_marked(mark, signal.SIGKILL)
            process.wait()
        return CompletedRun(process.returncode, _content(stdout), _content(stderr))


def _launcher_command(launcher: str, num_ranks: int, port: int) -> list[str]:
    if launcher == "python":
        assert num_ranks == 1, "plain python starts one process"
        return [sys.executable]
    if launcher == "torchrun":
        options = ["--nproc_per_node", str(num_ranks), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        return [sys.executable, "-m", "torch.distributed.run", *options]
    options = ["--num_gpus", str(num_ranks), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *options]


def kill_marked(mark: str, with_signal: signal.Signals) -> None:
    """Signal every process of the run. Launchers give their ranks sessions of their own, so the group is not enough."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RUN_MARK) == mark:
                process.send_signal(with_signal)


# ---- both ------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])
