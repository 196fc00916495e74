"""Size and checksum of files, read by several threads at a time: as fast as the disk, were there but one large file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_READERS = 8
_PIECE_BYTES = 2**26
"""What one thread reads of a file."""
_BLOCK_BYTES = 2**20
"""What it reads at a time: still in the core's cache when it is summed up."""

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, its lowest power in the highest bit, as in all numbers here; x^32 is left out."""
_ONE, _BYTE = 1 << 31, 1 << 23
"""The polynomials 1 and x^8."""


class Content(NamedTuple):
    """What a file must hold."""

    bytes: int
    crc32: int


def contents(root: Path, names: Iterable[str]) -> dict[str, Content]:
    """Size and checksum of files, by name relative to `root`.

    Raises:
        OSError: one can't be read.
    """
    return {name: _joined(pieces) for name, pieces in _read(root, names).items()}


def changed(root: Path, expected: Mapping[str, Content]) -> list[str]:
    """Names of those files that hold something else, or can't be read."""
    read = _read(root, expected)
    return [name for name, content in expected.items() if _joined_if_readable(read[name]) != content]


def _read(root: Path, names: Iterable[str]) -> dict[str, list[Future[Content]]]:
    """The pieces of each file, from its start to its end; all of them are done."""
    with ThreadPoolExecutor(_READERS) as readers:  # zlib lets other threads run
        return {name: [readers.submit(_piece, root / name, at) for at in _starts(root / name)] for name in names}


def _starts(path: Path) -> range:
    try:
        size = path.stat().st_size
    except OSError:  # reading it will raise the same
        size = 0
    return range(0, max(size, 1), _PIECE_BYTES)


def _piece(path: Path, start: int) -> Content:
    total = checksum = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size := file.readinto(block[: _PIECE_BYTES - total]):
            total, checksum = total + size, zlib.crc32(block[:size], checksum)
    return Content(total, checksum)


def _joined_if_readable(pieces: Iterable[Future[Content]]) -> Content | None:
    try:
        return _joined(pieces)
    except OSError:  # a bad sector, for one
        return None


def _joined(pieces: Iterable[Future[Content]]) -> Content:
    """The checksum of a whole from those of its parts: what comes first counts as many powers more as bytes follow.

    Source: zlib's crc32_combine, https://github.com/madler/zlib/blob/master/crc32.c
    """
    total = checksum = 0
    for piece in pieces:
        size, own = piece.result()
        total, checksum = total + size, _product(_power(size), checksum) ^ own
    return Content(total, checksum)


@lru_cache
def _power(size: int) -> int:
    """x^8 to the power of `size`, by squaring, modulo CRC-32's polynomial."""
    result, square = _ONE, _BYTE
    while size:
        if size & 1:
            result = _product(result, square)
        size, square = size >> 1, _product(square, square)
    return result


def _product(first: int, second: int) -> int:
    """Of two polynomials over bits, modulo CRC-32's."""
    result = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            result ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return result
