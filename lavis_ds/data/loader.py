"""Batches of this rank, in order, from data-loading processes; seeking to a step costs nothing."""

from __future__ import annotations

import atexit
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lavis_ds.batch import Batch
from lavis_ds.data.collate import Collator
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.order import SampleKey, StepPlan
from lavis_ds.errors import DataError, LavisError

Item = TypeVar("Item")

_OUT_OF_MEMORY = "Most often the machine ran out of memory; try a smaller run.num_workers."


def train_loader(
    dataset: EncodedDataset,
    plan: StepPlan,
    collator: Collator,
    start_step: int,
    num_steps: int,
    num_workers: int,
    pin_memory: bool,
) -> StepLoader:
    """The micro-batches of this rank, one list an optimizer step, from `start_step` on."""
    steps = range(start_step, start_step + num_steps)
    return StepLoader(BatchLoader(dataset, plan, collator, steps, num_workers, pin_memory), plan.accumulation)


def eval_loader(
    dataset: EncodedDataset, plan: StepPlan, collator: Collator, num_workers: int, pin_memory: bool
) -> BatchLoader:
    """All batches of this rank; the same number on every rank."""
    return BatchLoader(dataset, plan, collator, range(plan.num_steps), num_workers, pin_memory)


class BatchLoader(Iterator[Batch]):
    """The micro-batches of `steps`, one after another. The same batches whatever `num_workers`.

    Raises:
        DataError: on the batch concerned, when a sample can't be used or a data-loading process died.
    """

    def __init__(
        self,
        dataset: EncodedDataset,
        plan: StepPlan,
        collator: Collator,
        steps: range,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        loader = DataLoader(
            _MicroBatches(dataset, collator),
            batch_size=None,
            sampler=_Keys(plan, steps),
            num_workers=num_workers,
            # Whatever the process's default: forks share the annotations with their parent and are there at once.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=pin_memory,
            collate_fn=_unchanged,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else a loader's start draws from the global one, and a resumed run differs
        )
        with _keeping_sigchld():
            self._batches: Iterator[Batch | LavisError] = iter(loader)
        self._end = weakref.finalize(self, _end_workers, self._batches)
        self._end.atexit = False
        # PyTorch and multiprocessing end workers at exit by SIGTERM, which ours ignore, and wait for them: come before.
        atexit.register(self._end)

    def __next__(self) -> Batch:
        if not self._end.alive:
            raise StopIteration
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            batch = DataError(f"a data-loading process died: {error}", hint=_OUT_OF_MEMORY)
        if isinstance(batch, LavisError):
            self.close()
            raise batch
        return batch

    def close(self) -> None:
        """End the data-loading processes. No more batches come."""
        self._end()
        atexit.unregister(self._end)


class StepLoader(Iterator[list[Batch]]):
    """Groups of `accumulation` micro-batches."""

    def __init__(self, batches: BatchLoader, accumulation: int) -> None:
        self._batches, self._accumulation = batches, accumulation

    def __next__(self) -> list[Batch]:
        return [next(self._batches) for _ in range(self._accumulation)]

    def close(self) -> None:
        """End the data-loading processes. No more steps come."""
        self._batches.close()


class _Keys:
    """The sampler: one list of keys a micro-batch."""

    def __init__(self, plan: StepPlan, steps: range) -> None:
        self._plan, self._steps = plan, steps

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for step in self._steps:
            yield from self._plan.micro_batches(step)

    def __len__(self) -> int:
        return len(self._steps) * self._plan.accumulation


class _MicroBatches(Dataset[Batch | LavisError]):
    """Whole micro-batches, made in the data-loading process.

    A `LavisError` is handed over as a value: raised there, PyTorch would turn it into the text of a traceback.
    """

    def __init__(self, dataset: EncodedDataset, collator: Collator) -> None:
        self._dataset, self._collator = dataset, collator

    def __getitem__(self, keys: list[SampleKey]) -> Batch | LavisError:
        try:
            return self._collator([(self._dataset[key], key.is_filler) for key in keys])
        except LavisError as error:
            return error


def _unchanged(item: Item) -> Item:
    return item


@contextmanager
def _keeping_sigchld() -> Iterator[None]:
    """PyTorch's handler would raise a dead worker's error amid any line of the trainer; `next` notices it anyway."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, before)


def _end_workers(batches: Iterator[Batch | LavisError]) -> None:
    shut_down = getattr(
        batches, "_shutdown_workers", None
    )  # only an iterator with workers has it; else they end with it
    if shut_down is not None:
        shut_down()


def _ignore_signals(worker_id: int) -> None:
    """Ctrl-C and SIGTERM reach all processes; the trainer, which saves on them, must still get its batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
