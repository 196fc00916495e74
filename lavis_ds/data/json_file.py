"""JSON and JSON-lines files whose items are read from disk one at a time."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from lavis_ds.data import cache
from lavis_ds.errors import DataError

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")


class JsonFile:
    """The items of a JSON list or of a file with one JSON object a line.

    Kept in memory: where each item starts and ends, found once and cached. Read with `pread`: pages of a mapped file
    would count as this process's memory, and a file is shared by forked processes without sharing a position.
    """

    def __init__(self, path: str) -> None:
        find = find_list_items if path.lower().endswith(".json") else find_lines
        key = cache.fingerprint(find.__name__, cache.stamp([path]))
        found = cache.arrays("records", key, lambda: find(path))
        self.path = path
        self._spans, self._lines = np.array(found["spans"]), np.array(found["lines"])
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as the records are)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonFile, (self.path,)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        start, end = (int(at) for at in self._spans[index])
        item = _parse(os.pread(self._file.fileno(), end - start, start), self.where(index))
        if not isinstance(item, dict):
            raise DataError(
                "the item is no JSON object.",
                where=self.where(index),
                given=repr(item)[:80],
                expected="an object with fields",
            )
        return item

    def where(self, index: int) -> str:
        return f"{self.path}: line {self._lines[index]}" if len(self._lines) else f"{self.path}: item {index}"


def find_lines(path: str) -> cache.Arrays:
    """Byte offsets `spans` (n, 2) and numbers `lines` (n) of the lines that are not blank."""
    spans, lines, start = array("q"), array("I"), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                spans.extend((start + len(_BOM) * (number == 1 and line.startswith(_BOM)), start + len(line)))
                lines.append(number)
            start += len(line)
    return {"spans": np.array(spans, np.int64).reshape(-1, 2), "lines": np.array(lines, np.uint32)}


def find_list_items(path: str) -> cache.Arrays:
    """Byte offsets `spans` (n, 2) of the items of a JSON list; `lines` is empty.

    Raises:
        DataError: the file is no JSON list.
    """
    with open(path, "rb") as file:
        data = file.read()
    content = data.removeprefix(_BOM)
    try:
        text = content.decode()
        if text.strip() and not text.lstrip().startswith("["):
            raise DataError(
                "the annotation file is no JSON list.",
                where=path,
                given=f"a JSON {type(json.loads(text)).__name__}",
                expected="[item, item, ...], or one item a line in a .jsonl file",
            )
        spans = list(_item_spans(text)) if text.strip() else []
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _no_json(error, path) from None
    offsets, at, past = array("q"), len(data) - len(content), 0
    for position in (position for span in spans for position in span):
        at, past = at + len(text[past:position].encode()), position
        offsets.append(at)
    return {"spans": np.array(offsets, np.int64).reshape(-1, 2), "lines": np.empty(0, np.uint32)}


def _item_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the items of a JSON list start and end, in characters; the whole list is never in memory as objects."""

    def skip(position: int) -> int:
        return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # matches the empty string as well

    decode, position = json.JSONDecoder().raw_decode, skip(skip(0) + 1)
    is_closed = text[position : position + 1] == "]"
    while not is_closed:
        _, end = decode(text, position)
        yield position, end
        position = skip(end)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        is_closed = separator == "]"
        position = position if is_closed else skip(position + 1)
    if skip(position + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, skip(position + 1))


def read_json(path: str) -> Any:
    """The one value that a JSON file holds.

    Raises:
        DataError: there is no such file, or it is no JSON.
    """
    try:
        with open(path, "rb") as file:
            return _parse(file.read().removeprefix(_BOM), path)
    except FileNotFoundError:
        raise DataError("there is no such annotation file.", where=path) from None


def starts_with_object(path: str) -> bool:
    """Whether the file's first character besides space is `{`."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip().startswith("{")


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _no_json(error, where) from None


def _no_json(error: json.JSONDecodeError | UnicodeDecodeError, where: str) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError("the text is no UTF-8.", where=where, given=f"byte {error.start}: {error.reason}")
    return DataError(
        f"this is no valid JSON: {error.msg}.", where=where, given=f"line {error.lineno}, column {error.colno}"
    )
