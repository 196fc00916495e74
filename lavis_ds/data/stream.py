"""Micro-batches of samples that only come one after another, with a state to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from lavis_ds.batch import Batch, Sample, Unusable
from lavis_ds.data.builders.base import Lane, Streamed
from lavis_ds.data.collate import Collator
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.order import SampleKey
from lavis_ds.data.worker import SupervisedBatches, Watch, usable
from lavis_ds.errors import DataError, LavisError, SampleError


@dataclass(frozen=True)
class StreamPlan:
    """Optimizer steps over a stream. The order depends on ranks and workers, so both must stay as they are.

    Attributes:
        rows_a_step: rows of the global batch.
        micro_batch_size: rows of a micro-batch.
        data_parallel_size: number of ranks.
        dp_rank: this rank.
        num_workers: lanes of this rank, one for each data-loading process.
        num_steps: optimizer steps until the end.
    """

    rows_a_step: int
    micro_batch_size: int
    data_parallel_size: int
    dp_rank: int
    num_workers: int
    num_steps: int
    samples_an_epoch: int = 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.rows_a_step // (self.micro_batch_size * self.data_parallel_size)

    def describe(self) -> dict[str, Any]:
        """What the order of samples depends on, as JSON."""
        return {"batching": "stream", "ranks": self.data_parallel_size, "num_workers": self.num_workers}


class StreamLoader(SupervisedBatches):
    """The micro-batches of this rank from a stream. Each data-loading process reads a lane; their batches come in turn.

    Args:
        data: holds the one source, whose conversations are a `ConversationStream`.
        plan: ranks, workers and batch sizes.
        collator: samples to batches.
        num_batches: micro-batches until the end.
        state: what `state()` gave when the run was stopped; empty at the start.
        pin_memory: as in `SupervisedBatches`.
        timeout_s: as in `SupervisedBatches`.
    """

    def __init__(
        self,
        data: EncodedDataset,
        plan: StreamPlan,
        collator: Collator,
        num_batches: int,
        state: dict[str, Any],
        pin_memory: bool,
        timeout_s: int,
    ) -> None:
        watch = Watch(data, plan.num_workers)
        self._done, self._lanes = int(state.get("micro_batches", 0)), dict(state.get("lanes", {}))
        self._num_lanes = max(1, plan.num_workers)
        batches = _StreamedBatches(data, plan, collator, watch, range(self._done, num_batches), self._lanes)
        super().__init__(batches, watch, plan.num_workers, pin_memory, timeout_s)

    def __next__(self) -> Batch:
        batch = super().__next__()
        self._lanes[str(self._done % self._num_lanes)] = batch.stream_state
        self._done += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Where each lane is after the last batch that was handed out."""
        return {"micro_batches": self._done, "lanes": dict(self._lanes)}


class _StreamedBatches(IterableDataset[Batch | LavisError]):
    """Micro-batch b of a rank is made of lane b % lanes, whichever process it is that reads it."""

    def __init__(
        self,
        data: EncodedDataset,
        plan: StreamPlan,
        collator: Collator,
        watch: Watch,
        numbers: range,
        lanes: dict[str, Any],
    ) -> None:
        self._data, self._plan, self._collator, self._watch = data, plan, collator, watch
        self._numbers, self._lanes = numbers, dict(lanes)

    def __iter__(self) -> Iterator[Batch | LavisError]:
        info = get_worker_info()
        first, num_lanes = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = self._numbers[first::num_lanes]
        try:
            lane = self._open(self._numbers.start + first, num_lanes) if numbers else None
            for number in numbers:
                assert lane is not None
                yield self._batch(lane, number)
        except LavisError as error:
            yield error

    def _open(self, number: int, num_lanes: int) -> Lane:
        stream: Any = self._data.sources[0].conversations
        plan, worker = self._plan, number % num_lanes
        lane: Lane = stream.lane(self._data.seed, plan.dp_rank, plan.data_parallel_size, worker, num_lanes)
        state = self._lanes.get(str(worker))
        if state is not None:
            lane.load_state_dict(state)
        return lane

    def _batch(self, lane: Lane, number: int) -> Batch:
        plan, unusable = self._plan, list[Unusable]()
        start = (number * plan.data_parallel_size + plan.dp_rank) * plan.micro_batch_size
        rows = []
        for row in range(plan.micro_batch_size):
            key = SampleKey(0, start + row, lane.epoch, start + row)
            self._watch.begin(key)
            streamed, key = _following(lane), replace(key, epoch=lane.epoch)
            sample = usable(partial(self._encode, streamed, key), unusable)
            rows.append([] if sample is None else [sample])
        self._watch.finish()
        return replace(self._collator(rows, unusable), stream_state=lane.state_dict())

    def _encode(self, streamed: Streamed, key: SampleKey) -> Sample:
        own_id, conversation = streamed
        if isinstance(conversation, DataError):
            raise SampleError.about(f"{self._data.sources[0].name}/{own_id}", conversation)
        return self._collator.checked(self._data.encode(self._data.open_conversation(conversation, key)))


def _following(lane: Lane) -> Streamed:
    """The next sample, of the next epoch where this one is over."""
    for _ in range(2):
        for streamed in lane:
            return streamed
    raise DataError(
        "a data-loading process gets no samples: there are fewer than ranks times data-loading processes.",
        hint="Lower run.num_workers, or add data.",
    )
