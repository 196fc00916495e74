"""Pictures and videos at their markers in the user's texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lavis_ds.data.conversation import Content, Image, Text, Video
from lavis_ds.errors import DataError


@dataclass(frozen=True)
class Media:
    """What an item has of one kind.

    Attributes:
        parts: pictures or videos, in the order of their markers.
        marker: what marks their places, a regular expression without groups.
        shown: the marker as messages show it.
        field: where the item lists the parts.
    """

    parts: Sequence[Image | Video]
    marker: str
    shown: str
    field: str


def place(
    texts: Sequence[str], kinds: Sequence[Media], *, field: str, where: str, several_may_lead: bool
) -> list[tuple[Content, ...]]:
    """The contents of the user's turns: `texts` with every part in the place of its marker.

    Markers of a kind that the item has nothing of are text. Where a kind has no marker at all, its parts stand before
    the first text.

    Args:
        texts: what the user says, turn by turn; at least one.
        kinds: pictures, videos.
        field: where the item has the texts.
        where: file and item, for messages.
        several_may_lead: without markers, several parts of a kind are right; else only a single one is.

    Raises:
        DataError: markers and parts of a kind differ in number.
    """
    leading: list[Content] = []
    marked: list[Media] = []
    for kind in (kind for kind in kinds if kind.parts):
        markers = sum(len(re.findall(kind.marker, text)) for text in texts)
        if markers == 0 and (several_may_lead or len(kind.parts) == 1):
            leading += kind.parts
        elif markers == len(kind.parts):
            marked.append(kind)
        else:
            raise _markers_differ(kind, markers, field, where)
    pattern = re.compile("|".join(f"({kind.marker})" for kind in marked)) if marked else None
    upcoming = [iter(kind.parts) for kind in marked]
    contents: list[tuple[Content, ...]] = []
    for text in texts:
        content: list[Content] = []
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            content += [Text(text[end : match.start()]), next(upcoming[(match.lastindex or 1) - 1])]
            end = match.end()
        contents.append(tuple(part for part in (*content, Text(text[end:])) if part != Text("")))
    return [(*leading, *contents[0]), *contents[1:]]


def _markers_differ(kind: Media, markers: int, field: str, where: str) -> DataError:
    return DataError(
        f"`{field}` has {markers} marker(s) {kind.shown}, but `{kind.field}` has {len(kind.parts)} entry(s).",
        where=where,
        expected=f"one {kind.shown} for each, in order",
    )
