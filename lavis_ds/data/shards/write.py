"""Any builder's conversations -> shards: in parallel, the same bytes each time, going on after a kill."""

from __future__ import annotations

import fcntl
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from lavis_ds.data.conversation import Conversation
from lavis_ds.data.shards.index import IndexedSample, ShardIndex, index_shards, joined
from lavis_ds.data.shards.local_source import LocalSource
from lavis_ds.data.shards.members import members_of
from lavis_ds.data.shards.parallel import run_all
from lavis_ds.data.shards.retry import GIB, ReadOptions
from lavis_ds.data.shards.table import make_table
from lavis_ds.data.shards.urls import sidecar
from lavis_ds.errors import ConfigError, DataError

_MANIFEST = "shards.json"
_UNFINISHED = ".unfinished_"
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class WriteSummary:
    """What `write_shards` made.

    Attributes:
        folder: where the shards lie.
        shards: their paths, in the order of the samples.
        num_samples: samples in all of them.
        num_bytes: length of all of them.
        num_kept: shards that an earlier call had already written.
    """

    folder: str
    shards: tuple[str, ...]
    num_samples: int
    num_bytes: int
    num_kept: int


def write_shards(
    conversations: Sequence[Conversation],
    folder: str,
    *,
    max_samples: int = 10_000,
    max_bytes: int = GIB,
    num_processes: int = 1,
    resume: bool = False,
    progress: bool = False,
) -> WriteSummary:
    """Write conversations to `folder/000000.tar`, `000001.tar`, ..., each with its index beside it.

    Sample i has the key `i` in nine digits; its JSON member is in the OpenAI `messages` format; pictures and videos are
    copied as they are. Each `max_samples` conversations make one shard, or, where they are longer than `max_bytes`,
    several (`000000.tar`, `000000_01.tar`, ...). A shard has its name only once it is complete. The same conversations
    give the same bytes, whatever the number of processes.

    Args:
        conversations: what to write; read by several processes at once.
        folder: made if need be.
        max_samples: most samples of a shard.
        max_bytes: longest shard; a single sample may be longer.
        num_processes: shards written at the same time.
        resume: keep the shards that an earlier call with the same options completed.
        progress: show a bar on standard error.

    Raises:
        ConfigError: the folder holds shards already (without `resume`, or of other options), or is being written to.
        DataError: a conversation, or a picture or video of one, can't be read; the message names it.
    """
    if max_samples < 1 or max_bytes < 1 or num_processes < 1:
        raise ConfigError("the limits of a shard must be positive.", given=f"{max_samples} samples, {max_bytes} bytes")
    if not len(conversations):
        raise ConfigError("there are no samples to write.", where=folder)
    job = _Job(conversations, folder, max_samples, max_bytes, resume)
    with _locked(folder):
        _check_manifest(job)
        units = range(-(-len(conversations) // max_samples))
        written = run_all(job, units, num_processes=num_processes, progress=progress, title="writing shards")
        paths = [path for paths, _ in written for path in paths]
        index = index_shards(paths, num_processes=num_processes, progress=progress, sidecars=True)
    size = sum(shard.size for shard in index.shards)
    return WriteSummary(folder, tuple(paths), len(index), size, sum(len(paths) for paths, kept in written if kept))


@dataclass(frozen=True)
class _Job:
    """Writes unit u: the conversations from u * max_samples on, in one shard or several."""

    conversations: Sequence[Conversation]
    folder: str
    max_samples: int
    max_bytes: int
    resume: bool

    def __call__(self, unit: int) -> tuple[list[str], bool]:
        """Paths of the unit's shards, and whether they were there before."""
        if self.resume and self._is_complete(unit):
            return self._there(unit), True
        for path in self._there(unit):
            Path(path).unlink()
            Path(sidecar(path)).unlink(missing_ok=True)
        for part, samples in enumerate(self._parts(unit)):
            self._write(self._path(unit, part), samples)
        return self._there(unit), False

    def _path(self, unit: int, part: int) -> str:
        return os.path.join(self.folder, f"{unit:06d}{f'_{part:02d}' if part else ''}.tar")

    def _there(self, unit: int) -> list[str]:
        return list(takewhile(os.path.isfile, (self._path(unit, part) for part in count())))

    def _numbers(self, unit: int) -> range:
        return range(unit * self.max_samples, min((unit + 1) * self.max_samples, len(self.conversations)))

    def _members(self, number: int) -> list[tuple[str, bytes]]:
        return members_of(self.conversations[number], f"{number:09d}")

    def _parts(self, unit: int) -> Iterator[Iterator[list[tuple[str, bytes]]]]:
        """The unit's samples, divided by length. Each part must be consumed before the next is asked for."""
        upcoming = (self._members(number) for number in self._numbers(unit))
        held = [next(upcoming)]

        def part() -> Iterator[list[tuple[str, bytes]]]:
            length = 0
            while held and (length == 0 or length + _length(held[0]) <= self.max_bytes):
                sample = held.pop()
                length += _length(sample)
                held.extend([following] if (following := next(upcoming, None)) else [])
                yield sample

        while held:
            yield part()

    def _write(self, path: str, samples: Iterator[list[tuple[str, bytes]]]) -> None:
        unfinished = Path(self.folder, f"{_UNFINISHED}{os.path.basename(path)}")
        with open(unfinished, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
                for members in samples:
                    for name, data in members:
                        info = tarfile.TarInfo(name)  # no date and no owner: the same bytes each time
                        info.size = len(data)
                        archive.addfile(info, io.BytesIO(data))
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)

    def _is_complete(self, unit: int) -> bool:
        """Whether the unit's shards are whole and hold its samples; the first and last item of each are compared."""
        numbers = self._numbers(unit)
        try:
            indexes = [_index_of(path) for path in self._there(unit)]
        except DataError:
            return False  # damaged: written anew
        keys = [index[i].key for index in indexes for i in range(len(index))]
        if keys != [f"{number:09d}" for number in numbers]:
            return False
        for index in indexes:
            for i in {0, len(index) - 1}:
                self._check_same(index, index[i])
        return True

    def _check_same(self, index: ShardIndex, sample: IndexedSample) -> None:
        if index.read(sample, ["json"])["json"] != self._members(int(sample.key))[0][1]:
            raise ConfigError(
                "a shard there holds another sample than the data has now.",
                where=index.shards[0].url,
                given=f"sample {int(sample.key)}",
                hint="Write to another folder, or empty this one.",
            )


def _index_of(path: str) -> ShardIndex:
    """The index of one shard, read from its headers and kept nowhere.

    Raises:
        DataError: it is damaged.
    """
    source = LocalSource()
    stat = source.stat(path)
    return ShardIndex([stat], joined([make_table(source, stat)]), ReadOptions())


def _length(members: Sequence[tuple[str, bytes]]) -> int:
    return sum(_BLOCK + -(-len(data) // _BLOCK) * _BLOCK for _, data in members)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"the folder can't be written ({error}).", where=folder) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in Path(folder).glob(f"{_UNFINISHED}*"):
            left.unlink()
        yield
    except BlockingIOError:
        raise ConfigError("another process is writing shards there.", where=folder) from None
    finally:
        os.close(descriptor)


def _check_manifest(job: _Job) -> None:
    """What is in the folder must come from a call with the same options, and be wanted."""
    path = Path(job.folder, _MANIFEST)
    now = {"num_samples": len(job.conversations), "max_samples": job.max_samples, "max_bytes": job.max_bytes}
    before: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    if any(Path(job.folder).glob("*.tar")):
        if not job.resume:
            raise ConfigError(
                "the folder holds shards already.", where=job.folder, hint="Resume, or write to another folder."
            )
        if before != now:
            raise ConfigError(
                "the shards there were written with other options.",
                where=job.folder,
                given=str(now),
                expected=str(before),
            )
    unfinished = path.with_name(f"{_UNFINISHED}{_MANIFEST}")
    unfinished.write_text(json.dumps(now))
    unfinished.rename(path)
