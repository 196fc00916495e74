"""Shards on this machine, read at any place through handles that are kept open."""

from __future__ import annotations

import functools
import os
from typing import BinaryIO

from lavis_ds.data.shards.stat import MissingError, ShardStat
from lavis_ds.errors import DataError

_OPEN_FILES = 64


class LocalSource:
    """Reads with pread, which moves no file position: threads and forks may share a handle."""

    def stat(self, path: str) -> ShardStat:
        """Size and time of change of a shard.

        Raises:
            DataError: there is no such file.
        """
        try:
            stat = os.stat(path)
        except OSError as error:
            raise MissingError(f"the shard can't be opened ({error.strerror}).", where=path) from error
        return ShardStat(path, stat.st_size, str(stat.st_mtime_ns))

    def read(self, stat: ShardStat, start: int, length: int) -> bytes:
        """`length` bytes from `start` on.

        Raises:
            DataError: the file ends before, or can't be read.
        """
        try:
            handle = _handle(stat)
            pieces, missing = [], length
            while missing and (piece := os.pread(handle.fd, missing, start + length - missing)):
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            raise DataError(f"the shard can't be read ({error.strerror}).", where=stat.url) from error
        if missing:
            raise DataError(
                "the shard ends too early.",
                where=stat.url,
                given=f"{length - missing} of {length} bytes at {start}",
                hint="It was cut since it was indexed; start again.",
            )
        return b"".join(pieces)

    def read_all(self, path: str) -> bytes:
        """The whole of a small file."""
        with self.open(path) as file:
            return file.read()

    def open(self, path: str, size: int | None = None, start: int = 0) -> BinaryIO:
        """The shard from `start` on."""
        try:
            file = open(path, "rb")  # noqa: SIM115 (the caller closes it)
        except OSError as error:
            raise MissingError(f"the shard can't be opened ({error.strerror}).", where=path) from error
        file.seek(start)
        return file


class _Handle:
    """A file descriptor that is closed with its last user, so that dropping it from the cache breaks no read."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _handle(stat: ShardStat) -> _Handle:
    """The open file of a shard; another one where the shard was replaced.

    Raises:
        DataError: what lies there is not what was indexed.
    """
    handle = _Handle(stat.url)
    now = os.fstat(handle.fd)
    if now.st_size != stat.size or stat.version not in ("", str(now.st_mtime_ns)):
        raise DataError(
            "the shard changed since it was indexed.", where=stat.url, hint="Start again, so that it is indexed anew."
        )
    return handle
