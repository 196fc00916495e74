"""The index of a set of shards: any sample in one read. Built once, kept on disk, shared by all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_ds.data import cache
from lavis_ds.data.cache import Arrays
from lavis_ds.data.shards.download import check_room
from lavis_ds.data.shards.parallel import run_all
from lavis_ds.data.shards.retry import ReadOptions
from lavis_ds.data.shards.source import Source, checksum, source_of
from lavis_ds.data.shards.stat import ShardStat
from lavis_ds.data.shards.table import FORMAT, make_table, read_sidecar, write_sidecar
from lavis_ds.data.shards.tar import Span
from lavis_ds.data.shards.urls import expand, is_local

_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """Where a sample lies.

    Attributes:
        shard: number of its shard.
        key: its name in the shard.
        spans: place of each member in the shard, by extension (`jpg`, `0.png`), in the order of the shard.
    """

    shard: int
    key: str
    spans: Mapping[str, Span]


class ShardIndex:
    """All samples of some shards, in the order of the shards.

    Args:
        shards: the shards.
        arrays: the tables of `lavis_ds.data.shards.table`, one after another, and `shard_ends`, the samples up to each.
        options: how members are read.
    """

    def __init__(self, shards: Sequence[ShardStat], arrays: Arrays, options: ReadOptions) -> None:
        self.shards, self.options = tuple(shards), options
        self.arrays = arrays
        self._exts = arrays["exts"].tobytes().decode().split("\n")

    def __len__(self) -> int:
        return int(self.arrays["shard_ends"][-1])

    def __getitem__(self, number: int) -> IndexedSample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        start, end = _bounds(self.arrays["key_ends"], number)
        first, last = _bounds(self.arrays["member_ends"], number)
        key = self.arrays["key_bytes"][start:end].tobytes().decode()
        ext, offset, size = (self.arrays[f"member_{name}"][first:last].tolist() for name in ("ext", "offset", "size"))
        spans = {self._exts[e]: Span(o, s) for e, o, s in zip(ext, offset, size, strict=True)}
        return IndexedSample(int(np.searchsorted(self.arrays["shard_ends"], number, side="right")), key, spans)

    def read(self, sample: IndexedSample, exts: Iterable[str]) -> dict[str, bytes]:
        """Content of the members of a sample with these extensions, in one read.

        Raises:
            DataError: the shard can't be read, is another one by now, or ends too early.
        """
        spans = {ext: sample.spans[ext] for ext in exts}
        if not spans:
            return {}
        start = min(span.offset for span in spans.values())
        end = max(span.offset + span.size for span in spans.values())
        shard = self.shards[sample.shard]
        block = memoryview(source_of(shard.url, self.options).read(shard, start, end - start))
        return {ext: bytes(block[offset - start : offset - start + size]) for ext, (offset, size) in spans.items()}

    def has_member(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """For each sample, whether it has a member whose extension is `wanted`. Shape (samples,)."""
        flags = np.array([wanted(ext) for ext in self._exts])[self.arrays["member_ext"]]
        starts = np.concatenate(([0], self.arrays["member_ends"][:-1]))
        return np.logical_or.reduceat(flags, starts)

    @property
    def files(self) -> list[str]:
        """Files that change when a shard does: the local shards; for all others the file of the index itself."""
        local = [shard.url for shard in self.shards if is_local(shard.url)]
        if len(local) == len(self.shards):
            return local
        exts = self.arrays["exts"]
        assert isinstance(exts, np.memmap), "the cache's arrays are files"
        return [*local, str(exts.filename)]


def _bounds(ends: NDArray[np.int64], number: int) -> tuple[int, int]:
    return int(ends[number - 1]) if number else 0, int(ends[number])


def index_shards(
    urls: str | Sequence[str],
    *,
    num_processes: int = 1,
    progress: bool = False,
    sidecars: bool = False,
    options: ReadOptions | None = None,
    where: str | None = None,
) -> ShardIndex:
    """The index of shards. Shards indexed before, and those with a fitting index beside them, are not read again.

    Args:
        urls: paths, patterns and URLs; see `lavis_ds.data.shards.urls.expand`.
        num_processes: shards read at the same time.
        progress: show a bar on standard error.
        sidecars: put the index of each local shard beside it, so that it travels with the data.
        options: how to read shards that lie elsewhere.
        where: configuration key or option, for messages.

    Raises:
        ConfigError: a pattern is wrong, or a shard can be read from front to back only.
        DataError: a shard is damaged, names a key twice, holds no samples, or can't be read.
    """
    options = options or ReadOptions()
    shards = _stats(expand(urls, where), options)
    check_room(list(shards), options.cache_bytes)
    if sidecars:
        local = [shard for shard in shards if is_local(shard.url)]
        job = partial(_ensure_sidecar, options=options)
        run_all(job, local, num_processes=num_processes, progress=progress, title="indexing")

    def make() -> Arrays:
        job = partial(_ensure_table, options=options)
        run_all(job, shards, num_processes=num_processes, progress=progress and not sidecars, title="indexing")
        return joined([_table(shard, options) for shard in shards])

    arrays = cache.arrays("shard_index", cache.fingerprint(FORMAT, [_identity(shard) for shard in shards]), make)
    return ShardIndex(shards, arrays, options)


def _stats(urls: Sequence[str], options: ReadOptions) -> list[ShardStat]:
    sources = [source_of(url, options) for url in urls]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return list(pool.map(_stat, sources, urls))


def _stat(source: Source, url: str) -> ShardStat:
    stat = source.stat(url)
    if stat.version or not stat.has_ranges:
        return stat
    return replace(stat, version=checksum(source, stat))  # a store that tells neither date nor ETag


def _identity(shard: ShardStat) -> tuple[str, int, str]:
    return shard.url, shard.size, shard.version


def _ensure_sidecar(shard: ShardStat, options: ReadOptions) -> None:
    source = source_of(shard.url, options)
    if read_sidecar(source, shard) is None:
        write_sidecar(source, shard, make_table(source, shard))


def _ensure_table(shard: ShardStat, options: ReadOptions) -> None:
    _table(shard, options)


def _table(shard: ShardStat, options: ReadOptions) -> Arrays:
    """The table of a shard: from beside it, else from the cache, else made and put there."""
    source = source_of(shard.url, options)
    if is_local(shard.url) and (beside := read_sidecar(source, shard)):
        return beside

    def make() -> Arrays:
        far = None if is_local(shard.url) else read_sidecar(source, shard)
        return far or make_table(source, shard)

    return cache.arrays("shard_tables", cache.fingerprint(FORMAT, _identity(shard)), make)


def joined(tables: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """The tables of all shards as one, with one list of extensions."""
    numbers: dict[str, int] = {}
    member_ext = []
    for table in tables:
        own = [numbers.setdefault(ext, len(numbers)) for ext in table["exts"].tobytes().decode().split("\n")]
        member_ext.append(np.array(own, np.uint16)[table["member_ext"]])
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0] if name != "member_ext"}
    joined["member_ext"] = np.concatenate(member_ext)
    for name in ("key_ends", "member_ends"):
        joined[name] = _running([table[name] for table in tables])
    joined["exts"] = np.frombuffer("\n".join(numbers).encode(), np.uint8)
    joined["shard_ends"] = np.cumsum([len(table["key_ends"]) for table in tables])
    return joined


def _running(ends: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Ends within each shard -> ends within all."""
    before = np.cumsum([0, *(part[-1] for part in ends[:-1])])
    return np.concatenate([part + offset for part, offset in zip(ends, before, strict=True)])
