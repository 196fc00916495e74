"""What identifies the content of a shard."""

from __future__ import annotations

from dataclasses import dataclass

from lavis_ds.errors import DataError


class MissingError(DataError):
    """There is no such file, or it may not be read."""


@dataclass(frozen=True, slots=True)
class ShardStat:
    """A shard as it is now.

    Attributes:
        url: where it lies.
        size: length in bytes.
        version: changes with the content: time of change in ns for a local file, else an ETag or a date; may be empty.
        has_ranges: whether parts of it can be asked for.
    """

    url: str
    size: int
    version: str
    has_ranges: bool = True
