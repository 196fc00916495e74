"""Checked fields of annotation items, shared by the formats. Every complaint names file, item and field."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lavis_ds.data.conversation import Content, Image, Text
from lavis_ds.errors import DataError


def text_field(value: Any, field: str, where: str) -> str:
    """`value`, which must be a string.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, str):
        raise DataError(f"`{field}` is not text.", where=where, given=repr(value), expected="a string")
    return value


def text_list(item: Mapping[str, Any], field: str, where: str) -> list[str]:
    """The turns in `item[field]`, which may be one string or a list of strings.

    Raises:
        DataError: the field is missing, empty or holds something else.
    """
    if field not in item:
        raise DataError(
            f"`{field}` is missing.",
            where=where,
            given=f"fields {', '.join(item)}",
            expected="a string or a list of strings",
        )
    value = item[field]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise DataError(f"`{field}` is an empty list.", where=where, expected="at least one turn")
    return [text_field(v, f"{field}[{i}]" if isinstance(value, list) else field, where) for i, v in enumerate(values)]


def images_of(item: Mapping[str, Any], where: str, image_root: str | None) -> list[Image]:
    """The pictures in `item["image"]`: a path, a list of paths, or nothing.

    Raises:
        DataError: a path is no string or is relative to nothing, or the item is a video.
    """
    if item.get("video"):
        raise DataError(
            "videos can't be read by this builder.",
            where=where,
            given=f"`video`: {item['video']!r}",
            expected="`image` or text only",
        )
    value = item.get("image")
    if value is None or value == "":
        return []
    paths = value if isinstance(value, list) else [value]
    return [Image(_absolute(text_field(path, "image", where), where, image_root)) for path in paths]


def _absolute(path: str, where: str, image_root: str | None) -> str:
    if os.path.isabs(path):
        return path
    if image_root is None:
        raise DataError(
            "the image path is relative, and no folder is given that it is relative to.",
            where=where,
            given=repr(path),
            hint="Set `image_root` of the dataset.",
        )
    return os.path.join(image_root, path)


def split_at(marker: re.Pattern[str], text: str, images: Iterator[Image]) -> tuple[Content, ...]:
    """`text` with the next of `images` in the place of every match of `marker`."""
    pieces = marker.split(text)
    content: list[Content] = []
    for number, piece in enumerate(pieces):
        if number > 0:
            content.append(next(images))
        if piece:
            content.append(Text(piece))
    return tuple(content)


def markers_differ(markers: int, images: int, marker: str, field: str, where: str) -> DataError:
    """The error of an item whose markers and pictures differ in number."""
    return DataError(
        f"`{field}` has {markers} picture marker(s), but `image` has {images} picture(s).",
        where=where,
        expected=f"one {marker} for each picture, in order",
    )
