"""One function over many shards, in several processes, with a progress bar."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lavis_ds.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_job: Callable[[Any], Any] | None = None
"""What a worker process does with each item; it reaches the process by the fork, so it need not be picklable."""


def run_all(
    job: Callable[[Item], Result], items: Sequence[Item], *, num_processes: int, progress: bool, title: str
) -> list[Result]:
    """What `job` returns for each item, in the order of `items`. The first error ends all that has not begun.

    Raises:
        DataError: a process died.
    """
    num_processes = min(num_processes, len(items))
    with _bar(title, len(items), progress) as advance:
        if num_processes <= 1:
            results = []
            for item in items:
                results.append(job(item))
                advance()
            return results
        # Forks have all that `job` refers to; only items and results are sent.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(num_processes, context, _start, (job, os.getpid())) as pool:
            futures: list[Future[Result]] = [pool.submit(_run, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
                    advance()
            except BrokenProcessPool as error:
                raise DataError(
                    f"a process of {title!r} died.",
                    hint="Most often the machine ran out of memory; take fewer processes. Finished shards are kept.",
                ) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            return [future.result() for future in futures]


def _start(job: Callable[[Any], Any], parent: int) -> None:
    """A worker that outlived a killed parent would wait for ever, and hold the locks that it inherited."""
    global _job
    _job = job
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(item: Any) -> Any:
    assert _job is not None
    return _job(item)


@contextmanager
def _bar(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
