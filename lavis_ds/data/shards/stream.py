"""Shards read from front to back, each sample once an epoch over all ranks and workers, with a state to go on from.

For shards that can't be indexed, such as the output of a command. Shards that can be are better read through their
index: then the order does not depend on ranks and workers, and a run may go on with other numbers of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_ds.data.cache import fingerprint
from lavis_ds.data.shards.retry import ReadOptions
from lavis_ds.data.shards.source import open_stream
from lavis_ds.data.shards.tar import member_bytes
from lavis_ds.errors import CheckpointError, LavisError

_SHARDS, _SAMPLES = 0, 1  # streams of random numbers


@dataclass(frozen=True, slots=True)
class StreamedSample:
    """A sample as it came.

    Attributes:
        shard: number of its shard in `ShardStream.urls`.
        key: its name in the shard.
        members: content by extension.
    """

    shard: int
    key: str
    members: dict[str, bytes]


class ShardStream(Iterator[StreamedSample]):
    """The part of one worker of one rank, epoch after epoch: `next` ends with each epoch and goes on with the next one.

    Each epoch deals the shards, in random order, to the lanes (worker w of rank r is lane r * num_workers + w): as many
    whole shards to each as there are for all. What remains is fewer shards than lanes: each of these is read by several
    lanes, which take its samples in turn. So lanes differ by at most one shard, no sample is left out and none comes
    twice, for any number of shards, ranks and workers. The epoch of one lane may still end before another's.

    Order within a lane: `shuffle_buffer` samples are read, given out in random order, then the next ones are read. So
    the state is a place and a number, and going on reads at most one buffer, and the shard up to it, again. An error
    leaves the place as it was: the next call tries again.

    Args:
        urls: the shards, one URL each.
        seed: with the epoch, seeds the order.
        rank: number of the process.
        world_size: number of processes.
        worker: number of the data-loading worker.
        num_workers: number of workers a process.
        shuffle_buffer: samples held in memory; 1 keeps the order within shards, 0 that of the shards too.
        options: how to read shards that lie elsewhere.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        worker: int = 0,
        num_workers: int = 1,
        shuffle_buffer: int = 1000,
        options: ReadOptions | None = None,
    ) -> None:
        if not (0 <= rank < world_size and 0 <= worker < num_workers and shuffle_buffer >= 0):
            raise ValueError(f"rank {rank} of {world_size}, worker {worker} of {num_workers}, buffer {shuffle_buffer}")
        self.urls, self.seed = tuple(urls), seed
        self._lane, self._num_lanes = rank * num_workers + worker, world_size * num_workers
        self._buffer_size, self._options = shuffle_buffer, options or ReadOptions()
        self._deal = fingerprint(self.urls, seed, world_size, num_workers, shuffle_buffer, self._lane)
        self._samples = self._read((0, 0))
        self._start(epoch=0, position=(0, 0), given=0)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next sample belongs to."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Place of the next sample: epoch, where its buffer begins (shard of this lane, sample), and samples given."""
        shard, sample = self._position
        return {"epoch": self._epoch, "shard": shard, "sample": sample, "given": self._given, "deal": self._deal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the sample that was last when the state was taken.

        Raises:
            CheckpointError: the state is of other shards, or of another seed, buffer, rank, worker or number of them.
        """
        if state["deal"] != self._deal:
            raise CheckpointError(
                "the position in the shards is of a run with other shards or another deal.",
                expected="the same shards, seed, shuffle buffer, and numbers of ranks and workers",
                hint="Only indexed shards can go on with other numbers; see `lavis-ds data index`.",
            )
        self._start(int(state["epoch"]), (int(state["shard"]), int(state["sample"])), int(state["given"]))

    def __next__(self) -> StreamedSample:
        if self._given == len(self._buffer) and not self._fill():
            self._start(self._epoch + 1, position=(0, 0), given=0)
            raise StopIteration
        number = int(self._order[self._given])
        sample, self._buffer[number] = self._buffer[number], None
        self._given += 1
        assert sample is not None, "every sample of the buffer is given once"
        return sample

    def close(self) -> None:
        """End what is being read."""
        self._samples.close()

    def _start(self, epoch: int, position: tuple[int, int], given: int) -> None:
        self._samples.close()
        self._epoch, self._position, self._reached = epoch, position, position
        self._samples = self._read(position)
        self._buffer: list[StreamedSample | None] = []
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._given = 0
        if given and self._fill():
            if len(self._buffer) < given:
                raise CheckpointError("the shards hold fewer samples than when the position was saved.")
            for number in self._order[:given]:
                self._buffer[number] = None
            self._given = given

    def _fill(self) -> bool:
        """Read the next buffer; whether there was anything."""
        self._position, self._given, self._buffer = self._reached, 0, []
        try:
            for reached, sample in self._samples:
                self._buffer.append(sample)
                self._reached = reached
                if len(self._buffer) >= self._buffer_size:
                    break
        except LavisError:
            self._start(self._epoch, self._position, given=0)
            raise
        self._order = self._random_order(len(self._buffer), _SAMPLES, self._lane, *self._position)
        return bool(self._buffer)

    def _read(self, position: tuple[int, int]) -> Generator[tuple[tuple[int, int], StreamedSample]]:
        """The samples of this lane from `position` on, each with the position after it."""
        first_shard, first_sample = position
        for number, (shard, share, shares) in enumerate(self._dealt()):
            if number < first_shard:
                continue
            url = self.urls[shard]
            with open_stream(url, self._options) as file:
                for count, (key, members) in enumerate(member_bytes(file, url)):
                    if count % shares == share and (number > first_shard or count >= first_sample):
                        yield (number, count + 1), StreamedSample(shard, key, members)

    def _dealt(self) -> list[tuple[int, int, int]]:
        """Shards of this lane in this epoch: number, and this lane's share of the samples as (which, of how many)."""
        order = self._random_order(len(self.urls), _SHARDS)
        num_whole, num_shared = divmod(len(order), self._num_lanes)
        whole = order[self._lane : num_whole * self._num_lanes : self._num_lanes]
        dealt = [(int(shard), 0, 1) for shard in whole]
        if num_shared:
            group, share = self._lane % num_shared, self._lane // num_shared
            shares = len(range(group, self._num_lanes, num_shared))
            dealt.append((int(order[num_whole * self._num_lanes + group]), share, shares))
        return dealt

    def _random_order(self, size: int, *purpose: int) -> NDArray[np.int64]:
        if self._buffer_size == 0:
            return np.arange(size)
        # Raw bits, since NumPy does not promise for ever what Generator.permutation makes of them.
        seeds = np.random.SeedSequence([self.seed, self._epoch, *purpose])
        return np.argsort(np.random.Philox(seeds).random_raw(size), kind="stable")
