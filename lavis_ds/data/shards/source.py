"""The one way to the bytes of a shard, wherever it lies."""

from __future__ import annotations

import hashlib
from typing import BinaryIO, Protocol

from lavis_ds.data.shards.fsspec_source import FsspecSource
from lavis_ds.data.shards.http_source import HttpSource
from lavis_ds.data.shards.local_source import LocalSource
from lavis_ds.data.shards.pipe_source import PipeSource
from lavis_ds.data.shards.retry import ReadOptions
from lavis_ds.data.shards.stat import ShardStat
from lavis_ds.data.shards.urls import is_http, is_local, is_pipe
from lavis_ds.errors import ConfigError

_SAMPLED_BLOCKS, _BLOCK_BYTES = 8, 4096


class Source(Protocol):
    """Where shards of one kind of address are read."""

    def stat(self, url: str, /) -> ShardStat:
        """Size and version of a shard, as it is now."""

    def read(self, stat: ShardStat, start: int, length: int, /) -> bytes:
        """`length` bytes from `start` on, all of them."""

    def read_all(self, url: str, /) -> bytes:
        """The whole of a small file."""

    def open(self, url: str, /, size: int | None = None, start: int = 0) -> BinaryIO:
        """The bytes from `start` on, front to back; a connection that breaks is made anew."""


def source_of(url: str, options: ReadOptions) -> Source:
    """What reads `url` at any place.

    Raises:
        ConfigError: it can be read from front to back only.
    """
    if is_pipe(url):
        raise ConfigError(
            "the output of a command can't be indexed.",
            where=url,
            expected="a path, or an http(s)://, s3://, gs:// or hf:// address",
            hint="Set `stream: true` of the dataset to read it from front to back.",
        )
    if is_http(url):
        return HttpSource(options)
    return LocalSource() if is_local(url) else FsspecSource(options)


def open_stream(url: str, options: ReadOptions) -> BinaryIO:
    """The bytes of a shard, front to back; also of commands."""
    return PipeSource(options).open(url) if is_pipe(url) else source_of(url, options).open(url)


def checksum(source: Source, stat: ShardStat) -> str:
    """Hash of the size and of blocks spread evenly over the shard: cheap on any length, also far away."""
    digest = hashlib.sha256(str(stat.size).encode())
    last = max(0, stat.size - _BLOCK_BYTES)
    for start in sorted({last * number // (_SAMPLED_BLOCKS - 1) for number in range(_SAMPLED_BLOCKS)}):
        digest.update(source.read(stat, start, min(_BLOCK_BYTES, stat.size)))
    return digest.hexdigest()[:32]
