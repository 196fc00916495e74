"""Annotation files as compact records: parsed once for checking, kept as one block of bytes.

A list of a million dicts is copied page by page into every data-loading process, because reading a Python object writes
its reference count. One NumPy array of bytes is shared by all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lavis_ds.errors import DataError

_JSON_LINES = (".jsonl", ".ndjson")


class JsonRecords:
    """JSON values, indexable, in one block of bytes.

    Args:
        values: what to keep; consumed once.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        block, ends = bytearray(), [0]
        for value in values:
            block += json.dumps(value, separators=(",", ":")).encode()
            ends.append(len(block))
        self._bytes = np.frombuffer(block, np.uint8)
        self._ends = np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return json.loads(self._bytes[self._ends[index] : self._ends[index + 1]].tobytes())


def read_items(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (`FILE: item 3` or `FILE: line 4`) and content of every item of a JSON list or JSON-lines file.

    Raises:
        DataError: there is no such file, it is empty, it is no JSON, or an item is no object.
    """
    if not os.path.isfile(path):
        raise DataError(
            "there is no such annotation file.",
            where=path,
            hint="Check the dataset's `annotations`; relative paths start at the working directory.",
        )
    count = 0
    for place, item in _json_lines(path) if path.endswith(_JSON_LINES) else _json_list(path):
        if not isinstance(item, dict):
            raise DataError(
                "the item is no JSON object.", where=place, given=repr(item)[:80], expected="an object with fields"
            )
        count += 1
        yield place, item
    if count == 0:
        raise DataError("the annotation file holds no items.", where=path, expected="at least one")


def _json_list(path: str) -> Iterator[tuple[str, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        text = file.read()
    items = _parse(text, path) if text.strip() else []
    if not isinstance(items, list):
        raise DataError(
            "the annotation file is no JSON list.",
            where=path,
            given=f"a JSON {type(items).__name__}",
            expected="[item, item, ...], or one item a line in a .jsonl file",
        )
    return ((f"{path}: item {number}", item) for number, item in enumerate(items))


def _json_lines(path: str) -> Iterator[tuple[str, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}: line {number}", _parse(line, f"{path}: line {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"this is no valid JSON: {error.msg}.", where=where, given=f"line {error.lineno}, column {error.colno}"
        ) from None
