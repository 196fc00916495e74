"""Whole shards kept on disk, for servers that can't send parts of a file. In `shards/` of the cache folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from lavis_ds.data import cache
from lavis_ds.data.shards.stat import ShardStat
from lavis_ds.errors import ConfigError, DataError


def local_copy(stat: ShardStat, open_remote: Callable[[], BinaryIO], limit_bytes: int) -> str:
    """Path of the copy of a shard, fetched if it is not there. Of several processes one fetches, the others wait.

    Raises:
        ConfigError: it is larger than all the room there is, or the folder can't be written.
        DataError: what came is of another length.
    """
    path = cache.folder() / "shards" / f"{cache.fingerprint(stat.url, stat.size, stat.version)}.tar"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below, on every way out)
        except OSError as error:
            raise ConfigError(
                f"the cache folder can't be written ({error}).",
                where=str(cache.folder()),
                hint="Point the environment variable LAVIS_DS_CACHE to a folder that can.",
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _make_room(path.parent, stat, limit_bytes)
                _fetch(stat, open_remote, path)
    return str(path)


def check_room(stats: list[ShardStat], limit_bytes: int) -> None:
    """Raises:
    ConfigError: the shards that must be kept whole do not fit together, so that each read would fetch one anew.
    """
    needed = sum(stat.size for stat in stats if not stat.has_ranges)
    if needed > limit_bytes:
        raise ConfigError(
            "the web server can't send parts of a file, and the shards do not fit into the cache.",
            where=next(stat.url for stat in stats if not stat.has_ranges),
            given=f"{needed / 2**30:.2f} GiB",
            expected=f"at most {limit_bytes / 2**30:.2f} GiB",
            hint="Raise `cache_gib` of the dataset, download the shards, or use a server with range requests.",
        )


def _make_room(folder: Path, stat: ShardStat, limit_bytes: int) -> None:
    """Removes the copies fetched longest ago. Processes that have one open can go on reading it."""
    check_room([stat], limit_bytes)
    copies = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry) for entry in folder.glob("*.tar"))
    used = sum(size for _, size, _ in copies)
    for _, size, copy in copies:
        if used + stat.size <= limit_bytes:
            break
        copy.unlink(missing_ok=True)
        used -= size


def _fetch(stat: ShardStat, open_remote: Callable[[], BinaryIO], path: Path) -> None:
    unfinished = path.with_suffix(f".unfinished_{os.getpid()}")
    try:
        with open_remote() as remote, open(unfinished, "wb") as file:
            shutil.copyfileobj(remote, file, 1 << 20)
        if unfinished.stat().st_size != stat.size:
            raise DataError(
                "another number of bytes came than the server announced.",
                where=stat.url,
                given=f"{unfinished.stat().st_size} bytes",
                expected=f"{stat.size} bytes",
            )
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
