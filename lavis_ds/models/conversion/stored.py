"""One tensor in a file. Nothing of it is in memory before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """A tensor, or some of its rows.

    Attributes:
        source: a tensor of a mapped file, or what `safe_open(...).get_slice` returns.
        rows: which of its rows; all where it is None.
    """

    source: Any
    rows: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what `read` returns."""
        whole = tuple(self.source.shape if isinstance(self.source, Tensor) else self.source.get_shape())
        return whole if self.rows is None else (self.rows.stop - self.rows.start, *whole[1:])

    def read(self) -> Tensor:
        """The tensor; a view of the mapped file where that is possible."""
        found: Tensor = self.source[... if self.rows is None else self.rows]
        return found

    def split(self, parts: int) -> list[Stored]:
        """As many equal runs of rows, in order."""
        size = self.shape[0] // parts
        return [replace(self, rows=slice(number * size, (number + 1) * size)) for number in range(parts)]


def fill(target: Tensor, stored: Stored) -> None:
    """Copy a stored tensor into one of the same shape, in the target's type."""
    with torch.no_grad():
        target.copy_(stored.read())
