"""The table of one shard: its keys and where each member lies, as flat arrays; and its copy beside the shard."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lavis_ds.data.cache import Arrays
from lavis_ds.data.shards.source import Source, checksum
from lavis_ds.data.shards.stat import MissingError, ShardStat
from lavis_ds.data.shards.tar import member_spans
from lavis_ds.data.shards.urls import is_local, sidecar
from lavis_ds.errors import ConfigError, DataError

FORMAT = 1
"""Number of the layout below; a table of another one is made anew."""


def make_table(source: Source, stat: ShardStat) -> dict[str, NDArray[Any]]:
    """The table of a shard, from its headers.

    For S samples with M members in all: `key_bytes` and `key_ends` (S,), the keys in one block; `member_ends` (S,);
    `exts`, the different extensions, one a line; `member_ext` (M,), a number in it; `member_offset` (M,) and
    `member_size` (M,) in bytes.

    Raises:
        DataError: the tar is damaged, has two samples of one name, or holds none.
    """
    keys: list[str] = []
    ends: list[int] = []
    numbers: dict[str, int] = {}
    members: list[tuple[int, int, int]] = []
    local = is_local(stat.url)
    with source.open(stat.url, stat.size) as file:
        for key, spans in member_spans(file, stat.url, seekable=local):
            members += [(numbers.setdefault(ext, len(numbers)), *span) for ext, span in spans.items()]
            keys.append(key)
            ends.append(len(members))
    _check_keys(keys, stat.url)
    key_bytes, key_ends = join(keys)
    columns = np.array(members, np.int64).reshape(-1, 3)
    return {
        "key_bytes": key_bytes,
        "key_ends": key_ends,
        "member_ends": np.array(ends, np.int64),
        "exts": np.frombuffer("\n".join(numbers).encode(), np.uint8),
        "member_ext": columns[:, 0].astype(np.uint16),
        "member_offset": columns[:, 1].copy(),
        "member_size": columns[:, 2].copy(),
    }


def join(texts: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts as one block of bytes, and the place where each ends."""
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(text) for text in encoded], dtype=np.int64)


def _check_keys(keys: Sequence[str], url: str) -> None:
    if not keys:
        raise DataError("the shard holds no samples.", where=url, expected="members named KEY.EXT")
    if len(set(keys)) < len(keys):
        seen: set[str] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DataError(
            "two samples have the same key.",
            where=url,
            given=repr(twice),
            expected="the members of a sample one after another, and each key once in a shard",
        )


def write_sidecar(source: Source, stat: ShardStat, table: Arrays) -> None:
    """Put the table of a local shard beside it.

    Raises:
        ConfigError: the folder can't be written.
    """
    meta = {"format": FORMAT, "size": stat.size, "version": stat.version, "checksum": checksum(source, stat)}
    path = Path(sidecar(stat.url))
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished_")
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez_compressed(file, allow_pickle=False, meta=np.array(json.dumps(meta)), **table)
            os.chmod(unfinished, os.stat(stat.url).st_mode & 0o777)
            os.rename(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the index can't be written beside the shard ({error}).", where=str(path)) from error


def read_sidecar(source: Source, stat: ShardStat) -> dict[str, NDArray[Any]] | None:
    """The table that lies beside a shard, if it is of this very shard: same size, and same date or content."""
    if not stat.has_ranges:
        return None
    try:
        content = source.read_all(sidecar(stat.url))
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            table = dict(file)
        meta = json.loads(str(table.pop("meta")))
    except (MissingError, zipfile.BadZipFile, ValueError, KeyError):
        return None  # not there, or not whole: the table is made anew
    if (meta["format"], meta["size"]) != (FORMAT, stat.size):
        return None
    fits = (stat.version and meta["version"] == stat.version) or meta["checksum"] == checksum(source, stat)
    return table if fits else None
