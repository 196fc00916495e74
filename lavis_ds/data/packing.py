"""Which samples share a row: best fit, longest first, over the token counts of a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, each bin's sum at most `capacity`, with few bins.

    Longest first, each into the fullest bin that still has room (best fit decreasing: at most 11/9 of the fewest bins
    plus a constant; Johnson 1973). Rooms that bins have are bits of one number, so the smallest that is large enough is
    found without a search.

    Args:
        lengths: token counts, none above `capacity`.
        capacity: tokens of a bin.

    Raises:
        ValueError: a length is above `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered: Sequence[int] = lengths[order].tolist()
    if ordered and ordered[0] > capacity:
        raise ValueError(f"a length of {ordered[0]} does not fit into {capacity}")
    bins: list[list[int]] = []
    having: list[list[int]] = [[] for _ in range(capacity + 1)]  # room -> bins with exactly that much left
    rooms = 0  # bit r is set where having[r] is not empty
    for sample, length in zip(order.tolist(), ordered, strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = having[room].pop()
            if not having[room]:
                rooms ^= 1 << room
            bins[chosen].append(sample)
        else:
            room, chosen = capacity, len(bins)
            bins.append([sample])
        having[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return bins
