"""Arrays that are costly to make and depend only on files and options: kept on disk, shared by all processes.

They lie in `$LAVIS_DS_CACHE`, else in `lavis_ds` below `$XDG_CACHE_HOME` or `~/.cache`. An entry's name is a hash of
all that it was made from, so an entry is never wrong, only unused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_ds.errors import ConfigError

Arrays = Mapping[str, NDArray[Any]]

made: list[str] = []
"""Kinds of the entries that this process has made itself, in order: what a command can say it did."""


def folder() -> Path:
    """Where entries are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("LAVIS_DS_CACHE") or os.path.join(base, "lavis_ds"))


def fingerprint(*parts: Any) -> str:
    """Hash of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def stamp(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Absolute path, size and time of change of each file: what tells an old entry from one of the same files."""
    stats = [(os.path.abspath(path), os.stat(path)) for path in paths]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def arrays(kind: str, key: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of an entry, memory-mapped and read-only; made first where there is none.

    Where several processes ask at once, one makes the entry and the others wait.

    Args:
        kind: folder of entries of the same sort, such as `lengths`.
        key: a `fingerprint` of everything that the arrays depend on.
        make: called if need be.

    Raises:
        ConfigError: the cache folder can't be written.
    """
    entry = folder() / kind / key
    if not entry.is_dir():
        with _locked(entry.parent / f"{key}.lock"):
            if not entry.is_dir():
                _write(entry, make())
                made.append(kind)
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time.

    Raises:
        ConfigError: the cache folder can't be written, or its file system knows no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"the cache folder can't be written or locked ({error}).",
            where=str(folder()),
            hint="Point the environment variable LAVIS_DS_CACHE to a folder that can, such as one on a local disk.",
        ) from error
    with lock:
        yield
        path.unlink(missing_ok=True)


def _write(entry: Path, content: Arrays) -> None:
    """All arrays or none: a folder that exists is complete."""
    unfinished = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".unfinished_"))
    try:
        for name, array in content.items():
            np.save(unfinished / f"{name}.npy", array)
        unfinished.rename(entry)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
