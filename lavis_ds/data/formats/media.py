"""Where an item's pictures and videos lie: paths, `data:` URLs, or bytes inside a Parquet or Arrow file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from lavis_ds.data.conversation import Image, Video
from lavis_ds.data.formats.fields import text_field
from lavis_ds.errors import DataError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+=-]+)*;base64,[A-Za-z0-9+/]+={0,2}")


def images_of(item: Mapping[str, Any], field: str, where: str, image_root: str | None) -> list[Image]:
    """The pictures in `item[field]`: one, a list of them, or none."""
    return [image_of(value, field, where, image_root) for value in _listed(item.get(field))]


def videos_of(item: Mapping[str, Any], field: str, where: str, image_root: str | None) -> list[Video]:
    """The videos in `item[field]`: one, a list of them, or none."""
    return [video_of(value, field, where, image_root) for value in _listed(item.get(field))]


def image_of(value: Any, field: str, where: str, image_root: str | None) -> Image:
    """The picture that `value` stands for: a path, a `file:` or base64 `data:` URL, or `{"bytes": ..., "path": ...}`.

    Raises:
        DataError: it is something else, lies on another machine, or is relative to nothing.
    """
    if isinstance(value, Mapping):
        path, data = _stored(value, field, where)
        return Image(path, data) if data is not None else Image(_local(path, field, where, image_root))
    path = text_field(value, field, where)
    if path.startswith("data:"):
        if not _DATA_URL.fullmatch(path):
            raise DataError(
                f"`{field}` is no data URL of a picture.",
                where=where,
                given=repr(path[:60]),
                expected="data:image/<type>;base64,<letters, digits, + and />",
            )
        return Image(path)
    return Image(_local(path, field, where, image_root))


def video_of(value: Any, field: str, where: str, image_root: str | None) -> Video:
    """The video that `value` stands for: a path of a file or of a folder of frames, or `{"bytes": ..., "path": ...}`.

    Raises:
        DataError: it is something else, lies on another machine, or is relative to nothing.
    """
    if isinstance(value, Mapping):
        path, data = _stored(value, field, where)
        return Video(path, data) if data is not None else Video(_local(path, field, where, image_root))
    return Video(_local(text_field(value, field, where), field, where, image_root))


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _stored(value: Mapping[str, Any], field: str, where: str) -> tuple[str, bytes | None]:
    """A name or path, and the bytes where there are any: how `datasets` stores pictures and videos."""
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, bytes) and data:
        return f"{where}: {path or field}", data
    if isinstance(path, str) and path and data is None:
        return path, None
    raise DataError(
        f"`{field}` holds neither bytes nor a path.",
        where=where,
        given=f"fields {', '.join(value)}",
        expected='{"bytes": ..., "path": ...}',
    )


def _local(path: str, field: str, where: str, image_root: str | None) -> str:
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    elif path.startswith("data:") or _SCHEME.match(path):
        raise DataError(
            f"`{field}` does not lie on this machine; nothing is downloaded while training.",
            where=where,
            given=repr(path[:80]),
            expected="the path of a local file",
            hint="Download it first, and write its path below `image_root` in its place.",
        )
    if not path:
        raise DataError(f"`{field}` is an empty path.", where=where, expected="the path of a file")
    if os.path.isabs(path):
        return path
    if image_root is None:
        raise DataError(
            f"the path in `{field}` is relative, and no folder is given that it is relative to.",
            where=where,
            given=repr(path),
            hint="Set `image_root` of the dataset.",
        )
    return os.path.join(image_root, path)
