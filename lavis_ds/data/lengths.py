"""How many tokens and pictures every sample has: what packing and grouping plan by. Counted once, kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_ds.data import cache
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.order import Keys, SampleKey
from lavis_ds.errors import DataError

_CHUNK = 512

Progress = Callable[[int, int], None]
"""Called with samples done and samples in all."""


@dataclass(frozen=True)
class TokenCounts:
    """Counts of all samples of all datasets.

    Attributes:
        of: one array (samples, 2) int32 a dataset: tokens, image tokens included, and views of pictures. A sample that
            can't be encoded counts 0; it is reported when its turn comes.
    """

    of: Sequence[NDArray[np.int32]]

    def tokens(self, keys: Keys) -> NDArray[np.int64]:
        """Tokens of each of `keys`."""
        return self._column(keys, 0)

    def views(self, keys: Keys) -> NDArray[np.int64]:
        """Views of pictures of each of `keys`."""
        return self._column(keys, 1)

    def _column(self, keys: Keys, column: int) -> NDArray[np.int64]:
        result = np.empty(len(keys), np.int64)
        for number, counts in enumerate(self.of):
            chosen = keys.dataset == number
            result[chosen] = counts[keys.index[chosen], column]
        return result

    def at(self, key: SampleKey) -> tuple[int, int]:
        """Tokens and views of one sample."""
        tokens, views = self.of[key.dataset][key.index]
        return int(tokens), int(views)

    @cached_property
    def digest(self) -> str:
        """Tells these counts from others."""
        content = hashlib.sha256()
        for counts in self.of:
            content.update(np.ascontiguousarray(counts).data)
        return content.hexdigest()


def count(
    data: EncodedDataset,
    keys: Sequence[str | None],
    *,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> TokenCounts:
    """Counts of every sample of `data`.

    Args:
        data: with the processors of training.
        keys: for each source the fingerprint of all that its counts depend on; None where that is not known, and then
            they are counted anew every time.
        num_processes: processes that count; one for each CPU where left out.
        progress: told how far the counting is, from time to time.
    """
    processes = num_processes or len(os.sched_getaffinity(0))
    made = []
    for number, key in enumerate(keys):

        def counted(number: int = number) -> dict[str, NDArray[np.int32]]:
            return {"counts": _count(data, number, processes, progress)}

        made.append((counted() if key is None else cache.arrays("lengths", key, counted))["counts"])
    return TokenCounts(made)


def _count(data: EncodedDataset, number: int, processes: int, progress: Progress | None) -> NDArray[np.int32]:
    size = data.sizes[number]
    counts = np.zeros((size, 2), np.int32)
    for start, part in _parts(data, number, range(0, size, _CHUNK), processes):
        counts[start : start + len(part)] = part
        if progress is not None:
            progress(start + len(part), size)
    return counts


def _parts(
    data: EncodedDataset, number: int, starts: range, processes: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    if processes == 1 or len(starts) == 1:
        yield from (_part(start, data, number) for start in starts)
        return
    with get_context("fork").Pool(min(processes, len(starts)), _remember, (data, number)) as pool:
        yield from pool.imap_unordered(_part_in_process, starts)


_remembered: tuple[EncodedDataset, int]
"""What a counting process counts: set when it starts, inherited by the fork and so never pickled."""


def _remember(data: EncodedDataset, number: int) -> None:
    global _remembered
    _remembered = data, number
    torch.set_num_threads(1)


def _part_in_process(start: int) -> tuple[int, list[tuple[int, int]]]:
    return _part(start, *_remembered)


def _part(start: int, data: EncodedDataset, number: int) -> tuple[int, list[tuple[int, int]]]:
    return start, [_one(data, number, index) for index in range(start, min(start + _CHUNK, data.sizes[number]))]


def _one(data: EncodedDataset, number: int, index: int) -> tuple[int, int]:
    try:
        return data.count(number, index)
    except DataError:
        return 0, 0
