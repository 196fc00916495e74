"""Annotation files as records that are read from disk one at a time, whatever their container.

A list of a million dicts is copied page by page into every data-loading process, because reading a Python object writes
its reference count. Here a process holds offsets only, in one array that all processes forked from it share.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from lavis_ds.data import cache
from lavis_ds.data.json_file import JsonFile
from lavis_ds.data.table_file import TableFile
from lavis_ds.errors import ConfigError, DataError

Item = dict[str, Any]


class Records(Protocol):
    """The items of one or several files, in an order that never changes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """Raises:
        DataError: the item is no object; its place is named.
        """

    def where(self, index: int) -> str:
        """Place of the item for messages: `FILE: line 4`."""


def open_records(paths: Sequence[str]) -> Records:
    """The items of all files, one file after the other, each read by its ending.

    Raises:
        ConfigError: nothing reads such files, or the package that does is missing.
        DataError: there is no such file, it holds no items, or it is not what its ending says.
    """
    parts = [_open(path) for path in paths]
    return parts[0] if len(parts) == 1 else Joined(parts)


def read_items(path: str) -> Iterator[tuple[str, Item]]:
    """Place and content of every item of a file; raises as `open_records` does."""
    records = open_records([path])
    return ((records.where(index), records[index]) for index in range(len(records)))


def check_file(path: str) -> None:
    """Raises:
    DataError: there is no such file.
    """
    if not os.path.isfile(path):
        raise DataError(
            "there is no such annotation file.",
            where=path,
            hint="Check the dataset's `annotations`; relative paths start at the working directory.",
        )


def _open(path: str) -> Records:
    reader = READERS.get(os.path.splitext(path)[1].lower())
    if reader is None:
        raise ConfigError("annotation files of this kind can't be read.", where=path, expected=f"{', '.join(READERS)}")
    check_file(path)
    records = reader(path)
    if len(records) == 0:
        raise DataError("the annotation file holds no items.", where=path, expected="at least one")
    return records


class Joined:
    """Records of several files as one sequence."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, index: int) -> tuple[Records, int]:
        index = range(len(self))[index]
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part], index - (int(self._ends[part - 1]) if part else 0)

    def __getitem__(self, index: int) -> Item:
        part, position = self._find(index)
        return part[position]

    def where(self, index: int) -> str:
        part, position = self._find(index)
        return part.where(position)


class PackedItems:
    """Items made once by joining files, in one cached block of bytes that all processes share.

    Args:
        files: what the items depend on, besides `options`.
        options: JSON-able.
        make: the items; called if the cache has none.

    Raises:
        DataError: there are no items.
    """

    def __init__(self, files: Sequence[str], options: Any, make: Callable[[], Iterable[Item]]) -> None:
        key = cache.fingerprint(options, cache.stamp(files))
        found = cache.arrays("items", key, lambda: _pack(make()))
        self._block, self._ends, self._name = np.array(found["block"]), np.array(found["ends"]), files[0]
        if len(self) == 0:
            raise DataError("the annotation file holds no items.", where=", ".join(files), expected="at least one")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Item:
        index = range(len(self))[index]
        item: Item = json.loads(self._block[self._ends[index] : self._ends[index + 1]].tobytes())
        return item

    def where(self, index: int) -> str:
        return f"{self._name}: sample {index}"


def _pack(items: Iterable[Item]) -> cache.Arrays:
    block, ends = bytearray(), array("q", [0])
    for item in items:
        block += json.dumps(item, separators=(",", ":")).encode()
        ends.append(len(block))
    return {"block": np.frombuffer(block, np.uint8), "ends": np.array(ends, np.int64)}


READERS: dict[str, Callable[[str], Records]] = {
    ".json": JsonFile,
    ".jsonl": JsonFile,
    ".ndjson": JsonFile,
    ".parquet": TableFile,
    ".arrow": TableFile,
}
"""File ending -> what reads it."""
