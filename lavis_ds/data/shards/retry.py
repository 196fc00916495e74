"""Failures that pass: another try after a growing, random wait, and streams that go on where they broke off."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from lavis_ds.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
_BUFFER_BYTES = 1 << 20
_jitter = random.SystemRandom()  # the global generator belongs to the run's seed

GIB = 1 << 30


@dataclass(frozen=True)
class ReadOptions:
    """How shards that lie elsewhere are read.

    Attributes:
        retries: further tries after a failure; what arrived before it is kept, and counts the tries from anew.
        timeout_s: longest wait for a connection, and for the next bytes of one.
        cache_bytes: room for whole shards of servers that can't send parts of a file.
    """

    retries: int = 5
    timeout_s: float = 30.0
    cache_bytes: int = 50 * GIB


class TransientError(Exception):
    """A failure that may pass.

    Args:
        reason: what happened.
        wait_s: how long the other side asks to wait.
    """

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def retrying(attempt: Callable[[], T], url: str, retries: int) -> T:
    """What `attempt` returns, tried again after each `TransientError`: waits double, less up to a half at random.

    Raises:
        DataError: the last try failed too; names `url`, the number of tries and the last reason.
    """
    for number in range(retries + 1):
        try:
            return attempt()
        except TransientError as error:
            if number == retries:
                raise DataError(
                    f"the shard can't be read, after {number + 1} tries: {error}",
                    where=url,
                    hint="Check address and network; the options `retries` and `timeout_s` set how long to try.",
                ) from error
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**number) * _jitter.uniform(0.5, 1.0)
            time.sleep(min(LONGEST_WAIT_S, max(wait_s, error.wait_s or 0.0)))
    raise AssertionError("unreachable: the last try returns or raises")


class ResumingReader(io.RawIOBase):
    """A stream that is opened anew, at the byte where it broke off.

    Args:
        open_at: opens the stream at a byte position; raises TransientError, as may its `read`.
        url: for messages.
        retries: tries after each failure.
        size: length in bytes, where it is known: an earlier end is a failure.
        start: first byte.
    """

    def __init__(
        self, open_at: Callable[[int], BinaryIO], url: str, retries: int, size: int | None, start: int = 0
    ) -> None:
        self._open_at, self._url, self._retries, self._size = open_at, url, retries, size
        self._position = start
        self._stream: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = retrying(lambda: self._next(len(view)), self._url, self._retries)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _next(self, length: int) -> bytes:
        if self._position == self._size:
            return b""
        try:
            if self._stream is None:
                self._stream = self._open_at(self._position)
            data = self._stream.read(length)
            if not data and self._size is not None:
                raise TransientError(f"the connection ended at byte {self._position} of {self._size}")
            return data
        except TransientError:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        self._drop()
        super().close()

    def buffered(self) -> BinaryIO:
        """This stream, read in larger pieces."""
        return io.BufferedReader(self, _BUFFER_BYTES)
