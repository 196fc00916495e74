"""Items of LLaVA annotation files -> `Conversation`.

Source: docs/Finetune_Custom_Data.md of https://github.com/haotian-liu/LLaVA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lavis_ds.data.conversation import Content, Conversation, Image, Role, Text, Turn
from lavis_ds.data.formats.fields import images_of, markers_differ, split_at, text_field
from lavis_ds.errors import DataError

_MARKER = re.compile(r"<image>")
_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Fields: `conversations`, a list of `{"from": "human" | "gpt" | "system", "value": text}`; optionally `image`, a path
    or a list of paths. Pictures stand where human turns say `<image>`; a single picture without a marker stands first.
    Markers in other turns, and those of items without pictures, are text.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative image paths start from.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    said = _said(item, where)
    images = images_of(item, where, image_root)
    markers = sum(len(_MARKER.findall(text)) for role, text in said if role == "user")
    if images and markers != len(images) and not (markers == 0 and len(images) == 1):
        raise markers_differ(markers, len(images), "<image>", "conversations", where)
    upcoming = iter(images)
    turns = [Turn(role, _content(role, text, upcoming, bool(images) and markers > 0)) for role, text in said]
    if images and markers == 0:
        first = next(i for i, turn in enumerate(turns) if turn.role == "user")
        turns[first] = Turn("user", (*images, *turns[first].content))
    references = {"answer": said[-1][1]} if said[-1][0] == "assistant" else None
    return Conversation(conversation_id, tuple(turns), references)


def _content(role: Role, text: str, images: Iterator[Image], has_markers: bool) -> tuple[Content, ...]:
    if role == "user" and has_markers:
        return split_at(_MARKER, text, images)
    return (Text(text),) if text else ()


def _said(item: Mapping[str, Any], where: str) -> list[tuple[Role, str]]:
    """Role and text of every turn; a system turn only at the start, then human and gpt by turns, human first."""
    turns = item.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise DataError(
            "`conversations` is not a list of turns.",
            where=where,
            given=repr(turns),
            expected='[{"from": ..., "value": ...}, ...]',
        )
    said: list[tuple[Role, str]] = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise DataError(
                f"`{field}` is no turn.", where=where, given=repr(turn), expected='an object with "from" and "value"'
            )
        role = _ROLES.get(str(turn["from"]))
        allowed = _next_roles(said)
        if role is None or role not in allowed:
            expected = " or ".join(allowed.values())
            raise DataError(f"`{field}.from` is wrong.", where=where, given=repr(turn["from"]), expected=expected)
        said.append((role, text_field(turn["value"], f"{field}.value", where)))
    if not any(role == "user" for role, _ in said):
        raise DataError("`conversations` has no human turn.", where=where, expected="at least one")
    return said


def _next_roles(said: list[tuple[Role, str]]) -> dict[Role, str]:
    if not said:
        return {"user": "human", "system": "system"}
    return {"assistant": "gpt"} if said[-1][0] == "user" else {"user": "human"}
