"""Batches of this rank, in order, from data-loading processes; seeking to a step costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from lavis_ds.batch import Batch, Sample, Unusable
from lavis_ds.data.collate import Collator
from lavis_ds.data.dataset import EncodedDataset, Opened
from lavis_ds.data.order import SampleKey
from lavis_ds.data.plan import Row, StepPlan
from lavis_ds.data.worker import SupervisedBatches, Watch, usable
from lavis_ds.errors import LavisError


class BatchLoader(SupervisedBatches):
    """The micro-batches of `steps`, one after another. The same batches whatever `num_workers`.

    A sample that can't be used leaves its place empty; the batch says so (`Batch.unusable`).

    Args:
        dataset: samples by key.
        plan: the keys of this rank.
        collator: samples to batches.
        steps: optimizer steps whose batches come.
        num_workers: as in `SupervisedBatches`, and so are the others.
    """

    def __init__(
        self,
        dataset: EncodedDataset,
        plan: StepPlan,
        collator: Collator,
        steps: range,
        num_workers: int,
        pin_memory: bool,
        timeout_s: int,
    ) -> None:
        watch = Watch(dataset, num_workers)
        batches = _MicroBatches(dataset, collator, watch)
        super().__init__(batches, watch, num_workers, pin_memory, timeout_s, sampler=_Rows(plan, steps))


class StepLoader(Iterator[list[Batch]]):
    """Groups of `accumulation` micro-batches."""

    def __init__(self, batches: SupervisedBatches, accumulation: int) -> None:
        self._batches, self._accumulation = batches, accumulation

    def __next__(self) -> list[Batch]:
        return [next(self._batches) for _ in range(self._accumulation)]

    def state(self) -> dict[str, Any]:
        """What this rank must know, besides the step, to go on after the last group; as JSON."""
        return self._batches.state()

    def close(self) -> None:
        """End the data-loading processes. No more steps come."""
        self._batches.close()


class _Rows:
    """The sampler: the rows of one micro-batch at a time."""

    def __init__(self, plan: StepPlan, steps: range) -> None:
        self._plan, self._steps = plan, steps

    def __iter__(self) -> Iterator[list[Row]]:
        for step in self._steps:
            yield from self._plan.micro_batches(step)

    def __len__(self) -> int:
        return len(self._steps) * self._plan.accumulation


class _MicroBatches(Dataset[Batch | LavisError]):
    """Whole micro-batches, made in the data-loading process."""

    def __init__(self, dataset: EncodedDataset, collator: Collator, watch: Watch) -> None:
        self._dataset, self._collator, self._watch = dataset, collator, watch

    def __getitem__(self, rows: list[Row]) -> Batch | LavisError:
        unusable: list[Unusable] = []
        try:
            # All pictures come first: their pixels drive text's code and tables out of the processor's caches.
            opened = [[self._open(key, unusable) for key in row] for row in rows]
            samples = [[sample for one in row if (sample := self._encode(one, unusable)) is not None] for row in opened]
            return self._collator(samples, unusable)
        except LavisError as error:
            return error
        finally:
            self._watch.finish()

    def _open(self, key: SampleKey, unusable: list[Unusable]) -> Opened | None:
        self._watch.begin(key)
        return usable(lambda: self._dataset.open(key), unusable)

    def _encode(self, opened: Opened | None, unusable: list[Unusable]) -> Sample | None:
        if opened is None:
            return None
        self._watch.begin(opened.key)
        return usable(lambda: self._collator.checked(self._dataset.encode(opened)), unusable)
