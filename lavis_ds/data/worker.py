"""Data-loading processes under supervision: one that dies or hangs is an error that names its sample."""

from __future__ import annotations

import atexit
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lavis_ds.batch import Batch, Unusable
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.hand_over import Handed, Slots
from lavis_ds.data.order import SampleKey
from lavis_ds.errors import DataError, LavisError, SampleError
from lavis_ds.host_memory import keep_freed_memory

Item = TypeVar("Item")

_POLL_S, _EXIT_CODE_S = 2, 0.2
"""Seconds between looks at the data-loading processes, and seconds that one may take to end."""


class SupervisedBatches(Iterator[Batch]):
    """The batches of a dataset that makes whole ones, in order.

    Args:
        batches: gives a batch, or the error that ended it: raised in a data-loading process, PyTorch would turn it into
            the text of a traceback.
        watch: told by `batches` which sample each process is at.
        num_workers: data-loading processes; 0 loads in this one.
        pin_memory: hand over batches in pinned memory, which copies to a GPU asynchronously.
        timeout_s: seconds to wait for a data-loading process.
        sampler: what a map-style dataset is asked for.

    Raises:
        DataError: on the batch concerned, when a data-loading process died or gave nothing in time.
    """

    def __init__(
        self,
        batches: Dataset[Batch | LavisError],
        watch: Watch,
        num_workers: int,
        pin_memory: bool,
        timeout_s: int,
        sampler: Any = None,
    ) -> None:
        self._watch, self._timeout_s = watch, timeout_s
        self._slots = Slots(num_workers) if num_workers else None
        loader = DataLoader(
            batches,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            timeout=min(timeout_s, _POLL_S) if num_workers else 0,
            # Whatever the process's default: forks share the annotations with their parent and are there at once.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=pin_memory,
            collate_fn=_unchanged if self._slots is None else self._slots.put,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else a loader's start draws from the global one, and a resumed run differs
        )
        with _keeping_sigchld():
            self._batches: Iterator[Batch | Handed | LavisError] = iter(loader)
        self._end = weakref.finalize(self, _end_workers, self._batches)
        self._end.atexit = False
        # PyTorch and multiprocessing end workers at exit by SIGTERM, which ours ignore, and wait for them: come before.
        atexit.register(self._end)

    def __next__(self) -> Batch:
        if not self._end.alive:
            raise StopIteration
        batch = self._next()
        if isinstance(batch, LavisError):
            self.close()
            raise batch
        return batch

    def state(self) -> dict[str, Any]:
        """What is needed, besides the number of batches, to go on after the last one; as JSON."""
        return {}

    def close(self) -> None:
        """End the data-loading processes. No more batches come."""
        self._end()
        atexit.unregister(self._end)

    def _next(self) -> Batch | LavisError:
        """The next batch. PyTorch notices a dead worker only when its own time is up, so that is short."""
        started = time.monotonic()
        while True:
            try:
                found = next(self._batches)
                return found.take() if isinstance(found, Handed) else found
            except (RuntimeError, EOFError, OSError) as error:  # a batch of a dead worker fails in many ways
                if self._has_dead_workers():
                    what = "a data-loading process died."
                    hint = "Most often memory ran out (try a smaller run.num_workers), or a decoder crashed."
                    return self._given_up(what, hint)
                if "DataLoader timed out" not in str(error):
                    raise
                if time.monotonic() - started >= self._timeout_s:
                    what = f"no batch came from the data-loading processes for {self._timeout_s} s."
                    hint = "Look at these samples and what they are read from, or raise data.worker_timeout_s."
                    return self._given_up(what, hint)

    def _has_dead_workers(self) -> bool:
        for worker in self._workers:
            worker.join(_EXIT_CODE_S / len(self._workers))  # its connections end before its exit code is there
        return any(worker.exitcode is not None for worker in self._workers)

    def _given_up(self, what: str, hint: str) -> DataError:
        """What is wrong, with the samples that the workers were at. Leaves none of them behind."""
        doing = self._watch.describe([worker.exitcode for worker in self._workers])
        for worker in self._workers:
            worker.kill()  # one that hangs would not end by itself, and ours ignore SIGTERM
        return DataError(what, where=doing, hint=hint)

    @property
    def _workers(self) -> list[Any]:
        return getattr(self._batches, "_workers", [])


def usable(make: Callable[[], Item], unusable: list[Unusable]) -> Item | None:
    """What `make` gives; None where the sample can't be used, and why in `unusable`."""
    try:
        return make()
    except SampleError as error:
        unusable.append(Unusable(error.sample_id, error.source, str(error)))
        return None


class Watch:
    """Which sample each data-loading process is at, in memory that all of them share."""

    def __init__(self, dataset: EncodedDataset, num_workers: int) -> None:
        self._dataset = dataset
        shared: Any = torch.zeros((num_workers, 3), dtype=torch.int64)  # dataset, index, since
        self._at: NDArray[np.int64] = shared.share_memory_().numpy()

    def begin(self, key: SampleKey) -> None:
        """This process starts on a sample."""
        worker = get_worker_info()
        if worker is not None:
            self._at[worker.id] = key.dataset, key.index, time.monotonic_ns()

    def finish(self) -> None:
        """This process is between samples."""
        worker = get_worker_info()
        if worker is not None:
            self._at[worker.id, 2] = 0

    def describe(self, exit_codes: list[int | None]) -> str:
        """One clause for each process that is dead or at a sample."""
        now = time.monotonic_ns()
        clauses = []
        for worker, (dataset, index, since) in enumerate(self._at.tolist()):
            name = self._dataset.name_of(SampleKey(dataset, index, 0, 0))
            state = f"at sample {name} for {(now - since) / 1e9:.0f} s" if since else "between samples"
            if exit_codes[worker] is not None:
                clauses.append(f"worker {worker} (dead, exit code {exit_codes[worker]}) {state}")
            elif since:
                clauses.append(f"worker {worker} {state}")
        return "; ".join(clauses) or "all workers between samples"


def _unchanged(item: Item) -> Item:
    return item


@contextmanager
def _keeping_sigchld() -> Iterator[None]:
    """PyTorch's handler would raise a dead worker's error amid any line of the trainer; `next` notices it anyway."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)


def _end_workers(batches: Any) -> None:
    shut_down = getattr(
        batches, "_shutdown_workers", None
    )  # only an iterator with workers has it; else they end with it
    if shut_down is not None:
        shut_down()


def _start_worker(worker_id: int) -> None:
    """Ctrl-C and SIGTERM reach all processes; the trainer, which saves on them, must still get its batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_freed_memory()
