"""Members of a tar file, grouped to samples by name: strict where Python's tarfile passes over damage in silence."""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from lavis_ds.errors import DataError

T = TypeVar("T")

# As in webdataset: the key ends at the first dot of the file's name. Names such as `__meta__/x` are no samples.
_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/\n]+)")
_META = re.compile(r"__[^/]*__($|/)")
_BLOCK_BYTES = 1 << 18
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


class Span(NamedTuple):
    """Where the bytes of a member lie in its shard."""

    offset: int
    size: int


class _StrictInfo(tarfile.TarInfo):
    """Headers that are damaged or missing amid a file end the reading with an error, not as if the file ended there."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _StrictInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the end mark
                raise
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from None


_OPTIONS: dict[str, Any] = {"tarinfo": _StrictInfo, "encoding": "utf-8", "errors": "backslashreplace"}


def member_spans(file: BinaryIO, where: str, *, seekable: bool) -> Iterator[tuple[str, dict[str, Span]]]:
    """Key, and place of each member by its extension, of every sample of an uncompressed tar.

    Raises:
        DataError: the tar is compressed, damaged or cut short, or names a member twice.
    """
    members = _members(file, where, "r:" if seekable else "r|")
    return _grouped(((key, ext, Span(info.offset_data, info.size)) for key, ext, info, _ in members), where)


def member_bytes(file: BinaryIO, where: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key, and content of each member by its extension, of every sample, front to back; the tar may be compressed.

    Raises:
        DataError: the tar is damaged or cut short, or names a member twice.
    """
    return _grouped(
        ((key, ext, _content(archive, info, where)) for key, ext, info, archive in _members(file, where, "r|*")), where
    )


def _members(
    file: BinaryIO, where: str, mode: Literal["r:", "r|", "r|*"]
) -> Iterator[tuple[str, str, tarfile.TarInfo, tarfile.TarFile]]:
    try:
        with tarfile.open(fileobj=file, mode=mode, bufsize=_BLOCK_BYTES, **_OPTIONS) as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
                matched = _NAME.fullmatch(info.name)
                if info.isreg() and matched and not _META.match(info.name):
                    if info.issparse():
                        raise DataError("sparse members can't be read.", where=f"{where}: {info.name}")
                    yield matched[1], matched[2], info, archive
    except _DAMAGE as error:
        raise _damaged(where, error) from error


def _content(archive: tarfile.TarFile, info: tarfile.TarInfo, where: str) -> bytes:
    try:
        file = archive.extractfile(info)
        assert file is not None, "a regular member has content"
        data = file.read()
    except _DAMAGE as error:
        raise _damaged(where, error) from error
    if len(data) < info.size:
        raise DataError("the member is cut short.", where=f"{where}: {info.name}", given=f"{len(data)} bytes")
    return data


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(
        f"the shard is no readable tar file: {error}.",
        where=where,
        expected="a tar file with its end mark; for an index, one that is not compressed",
        hint="Fetch or write it anew; `gunzip` what is compressed, pictures in it are so already.",
    )


def _grouped(members: Iterator[tuple[str, str, T]], where: str) -> Iterator[tuple[str, dict[str, T]]]:
    """Samples: neighbours with the same key."""
    current: str | None = None
    sample: dict[str, T] = {}
    for key, ext, content in members:
        if key != current:
            if current is not None:
                yield current, sample
            current, sample = key, {}
        if ext in sample:
            raise DataError("a member stands twice in the shard.", where=f"{where}: {key}.{ext}")
        sample[ext] = content
    if current is not None:
        yield current, sample
