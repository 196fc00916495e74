"""Shards in object stores and wherever else fsspec reads: `s3://`, `gs://`, `hf://`, `memory://`, ...

The store's own package must be installed, such as s3fs or gcsfs.
"""

from __future__ import annotations

from typing import Any, BinaryIO, cast

from lavis_ds.data.shards.retry import ReadOptions, ResumingReader, TransientError, retrying
from lavis_ds.data.shards.stat import MissingError, ShardStat
from lavis_ds.errors import ConfigError, DataError

_VERSION_FIELDS = ("ETag", "etag", "mtime", "last_modified", "LastModified", "updated", "created")
_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of `url` and the path in it. fsspec keeps one for each process, so this is cheap.

    Raises:
        ConfigError: the protocol is unknown or its package is not installed.
    """
    from fsspec.core import url_to_fs  # takes 50 ms, and few need it

    try:
        return cast("tuple[Any, str]", url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"the address can't be opened: {error}", where=url, hint="s3:// needs `pip install s3fs`, gs:// gcsfs."
        ) from error


class FsspecSource:
    """Reads by byte range through fsspec."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def stat(self, url: str) -> ShardStat:
        """Size and version of a shard.

        Raises:
            DataError: it is not there or the store does not answer.
        """
        fs, path = filesystem(url)
        info = self._retrying(url, lambda: fs.info(path))
        if info.get("size") is None:
            raise DataError("the store does not say how long the shard is.", where=url)
        version = next((str(info[field]) for field in _VERSION_FIELDS if info.get(field)), "")
        return ShardStat(url, int(info["size"]), version)

    def read(self, stat: ShardStat, start: int, length: int) -> bytes:
        """`length` bytes from `start` on."""
        fs, path = filesystem(stat.url)
        return bytes(self._retrying(stat.url, lambda: self._range(fs, path, start, length)))

    def read_all(self, url: str) -> bytes:
        """The whole of a small file."""
        fs, path = filesystem(url)
        return bytes(self._retrying(url, lambda: fs.cat_file(path)))

    def open(self, url: str, size: int | None = None, start: int = 0) -> BinaryIO:
        """The shard from `start` on, front to back."""
        fs, path = filesystem(url)
        size = self.stat(url).size if size is None else size

        def open_at(position: int) -> BinaryIO:
            file = _guarded(url, lambda: fs.open(path, "rb"))
            file.seek(position)
            return cast(BinaryIO, _GuardedFile(file, url))

        return ResumingReader(open_at, url, self.options.retries, size, start).buffered()

    def _range(self, fs: Any, path: str, start: int, length: int) -> bytes:
        data = bytes(fs.cat_file(path, start=start, end=start + length))
        if len(data) < length:
            raise TransientError(f"{len(data)} of {length} bytes came")
        return data

    def _retrying(self, url: str, call: Any) -> Any:
        return retrying(lambda: _guarded(url, call), url, self.options.retries)


class _GuardedFile:
    """A file of fsspec whose failures are TransientErrors."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def read(self, length: int) -> bytes:
        return bytes(_guarded(self._url, lambda: self._file.read(length)))

    def close(self) -> None:
        self._file.close()


def _guarded(url: str, call: Any) -> Any:
    try:
        return call()
    except TransientError:
        raise
    except _GONE as error:
        raise MissingError(
            f"the shard can't be opened ({type(error).__name__}).", where=url, hint="Check the address and credentials."
        ) from error
    except Exception as error:  # every store raises what its own client library does
        raise TransientError(f"{type(error).__name__}: {error}") from error
