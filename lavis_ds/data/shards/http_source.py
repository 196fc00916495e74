"""Shards on web servers, read by byte range; whole and once from servers that can't send parts."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from contextlib import closing
from typing import Any, BinaryIO, cast

from lavis_ds.data.shards.download import local_copy
from lavis_ds.data.shards.local_source import LocalSource
from lavis_ds.data.shards.retry import ReadOptions, ResumingReader, TransientError, retrying
from lavis_ds.data.shards.stat import MissingError, ShardStat
from lavis_ds.errors import DataError

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_BROKEN = (OSError, http.client.HTTPException)
_CHUNK_BYTES = 1 << 20


class HttpSource:
    """Reads through urllib, which knows redirects and the proxy variables of the environment."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def stat(self, url: str) -> ShardStat:
        """Size and version of a shard, asked for with its first byte: not every server answers HEAD.

        Raises:
            DataError: the server refuses, does not answer, or does not say the size.
        """
        with closing(self._get(url, "bytes=0-0")) as response:
            headers = response.headers
            version = headers.get("ETag") or headers.get("Last-Modified") or ""
            has_ranges = response.status == 206
            size = headers.get("Content-Range", "").rpartition("/")[2] if has_ranges else headers.get("Content-Length")
        if not (size or "").isdecimal():
            raise DataError("the server does not say how long the shard is.", where=url, given=repr(size))
        return ShardStat(url, int(size), version, has_ranges)

    def read(self, stat: ShardStat, start: int, length: int) -> bytes:
        """`length` bytes from `start` on."""
        if not stat.has_ranges:
            path = local_copy(stat, lambda: self.open(stat.url, stat.size), self.options.cache_bytes)
            return LocalSource().read(ShardStat(path, stat.size, ""), start, length)
        data = bytearray()
        while len(data) < length:
            retrying(lambda: self._append(data, stat, start, length), stat.url, self.options.retries)
        return bytes(data)

    def read_all(self, url: str) -> bytes:
        """The whole of a small file."""
        stat = self.stat(url)
        with self.open(url, stat.size) as stream:
            return stream.read()

    def open(self, url: str, size: int | None = None, start: int = 0) -> BinaryIO:
        """The shard from `start` on, front to back."""
        total = self.stat(url).size if size is None else size  # without it an early end would look like the end
        return ResumingReader(
            lambda position: self._open_at(url, position, total), url, self.options.retries, total, start
        ).buffered()

    def _append(self, data: bytearray, stat: ShardStat, start: int, length: int) -> None:
        """One request for what is missing of `data`. A failure after some bytes came is progress, not a try."""
        before = len(data)
        with closing(self._request(stat.url, f"bytes={start + before}-{start + length - 1}")) as response:
            _check_part(response, stat.url, stat.size)
            try:
                while len(data) < length and (chunk := response.read(min(_CHUNK_BYTES, length - len(data)))):
                    data += chunk
            except http.client.IncompleteRead as error:
                data += error.partial
            except _BROKEN as error:
                if len(data) == before:
                    raise TransientError(_reason(error)) from error
        if len(data) == before:
            raise TransientError("the connection ended before any byte came")

    def _open_at(self, url: str, position: int, size: int) -> BinaryIO:
        response = self._request(url, f"bytes={position}-")
        stream = _Body(response)
        if response.status == 206:
            _check_part(response, url, size)
        else:
            stream.skip(position)
        return cast(BinaryIO, stream)

    def _get(self, url: str, byte_range: str) -> Any:
        return retrying(lambda: self._request(url, byte_range), url, self.options.retries)

    def _request(self, url: str, byte_range: str) -> Any:
        headers = {"Range": byte_range, "Accept-Encoding": "identity", "User-Agent": "lavis-ds"}
        try:
            return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=self.options.timeout_s)
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            if error.code in _TRANSIENT:
                after = error.headers.get("Retry-After", "")
                raise TransientError(reason, float(after) if after.isdecimal() else None) from None
            kind = MissingError if error.code in (401, 403, 404, 410) else DataError
            raise kind(f"the server refuses: {reason}.", where=url, hint="Check the address and access.") from None
        except _BROKEN as error:
            raise TransientError(_reason(error)) from error


class _Body:
    """The body of a response whose failures are TransientErrors."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def read(self, length: int) -> bytes:
        try:
            return bytes(self._response.read(length))
        except http.client.IncompleteRead as error:
            return error.partial
        except _BROKEN as error:
            raise TransientError(_reason(error)) from error

    def skip(self, length: int) -> None:
        while length > 0:
            chunk = self.read(min(_CHUNK_BYTES, length))
            if not chunk:
                raise TransientError("the connection ended early")
            length -= len(chunk)

    def close(self) -> None:
        self._response.close()


def _check_part(response: Any, url: str, size: int) -> None:
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status != 206 or total not in (str(size), "*"):
        response.close()
        raise DataError(
            "the shard changed while it was in use.",
            where=url,
            given=f"status {response.status}, {total or 'no'} bytes",
            expected=f"status 206, {size} bytes",
            hint="Start again, so that it is indexed anew.",
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
