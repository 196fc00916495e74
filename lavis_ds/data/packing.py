"""Which samples share a row: best fit, longest first, over the token counts of a window."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

_LEVELS = 16
"""Amounts of views that samples need, and as many that bins have left, by which bins are told apart."""


def best_fit(
    lengths: NDArray[np.int64],
    capacity: int,
    views: NDArray[np.int64] | None = None,
    max_views: int | None = None,
) -> list[list[int]]:
    """Bins of indices into `lengths`, each bin's sum at most `capacity`, with few bins.

    Longest first, each into the fullest bin that still has room (best fit decreasing: at most 11/9 of the fewest bins
    plus a constant; Johnson 1973). With two budgets a sample is as long as the sum of its shares of them: what is large
    in one of them alone would else be left for the end, when no bin is left that has much of it.

    Args:
        lengths: token counts, none above `capacity`.
        capacity: tokens of a bin.
        views: views of each sample; counted where `max_views` is given.
        max_views: views of a bin. A sample with more shares its bin with such as have none.

    Raises:
        ValueError: a length is above `capacity`.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a length of {lengths.max()} does not fit into {capacity}")
    if views is None or max_views is None:
        return _by_one(lengths, capacity)
    return _by_both(lengths, capacity, views.clip(max=max_views), max_views)


def _by_one(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    order = np.argsort(-lengths, kind="stable")
    bins: list[list[int]] = []
    rooms = _Rooms(capacity)
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        room = rooms.smallest(length)
        if room < 0:
            room, chosen = capacity, len(bins)
            bins.append([sample])
        else:
            chosen = rooms.take(room)
            bins[chosen].append(sample)
        rooms.put(room - length, chosen)
    return bins


def _by_both(lengths: NDArray[np.int64], capacity: int, views: NDArray[np.int64], max_views: int) -> list[list[int]]:
    """As `_by_one`, of bins that can take as many views."""
    order = np.argsort(-(lengths / capacity + views / max_views), kind="stable")
    steps = np.linspace(0, 1, _LEVELS)
    amounts = np.quantile(views, steps, method="higher") if len(views) else views
    levels = np.unique(np.concatenate([amounts, (steps * max_views).astype(np.int64)])).tolist()
    enough = np.searchsorted(levels, views).tolist()
    bins: list[list[int]] = []
    left: list[int] = []  # views that each bin may still get
    rooms = [_Rooms(capacity) for _ in levels]  # of bins that have so many left, and fewer than the next level
    for sample in order.tolist():
        length = int(lengths[sample])
        found = [(rooms[level].smallest(length), level) for level in range(enough[sample], len(levels))]
        room, level = min((pair for pair in found if pair[0] >= 0), default=(-1, -1))
        if room < 0:
            room, chosen = capacity, len(bins)
            bins.append([sample])
            left.append(max_views)
        else:
            chosen = rooms[level].take(room)
            bins[chosen].append(sample)
        left[chosen] -= int(views[sample])
        rooms[bisect_right(levels, left[chosen]) - 1].put(room - length, chosen)
    return bins


class _Rooms:
    """Bins by the room that they have left.

    Rooms that bins have are bits of one number, so the smallest that is large enough is found without a search.
    """

    def __init__(self, capacity: int) -> None:
        self._having: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room, the bins that have it
        self._there = 0  # bit r is set where `_having[r]` is not empty

    def smallest(self, length: int) -> int:
        """The smallest room that bins have, of those of at least `length`; -1 where there is none."""
        fitting = self._there >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else -1

    def take(self, room: int) -> int:
        """A bin with that room, no longer in here."""
        chosen = self._having[room].pop()
        if not self._having[room]:
            self._there ^= 1 << room
        return chosen

    def put(self, room: int, chosen: int) -> None:
        self._having[room].append(chosen)
        self._there |= 1 << room
