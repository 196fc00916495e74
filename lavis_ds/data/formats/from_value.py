"""Turns written as `{"from": ..., "value": ...}`, as LLaVA and ShareGPT have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavis_ds.data.conversation import Conversation, Role, Text, Turn
from lavis_ds.data.formats.fields import required, text_field
from lavis_ds.data.formats.markers import Media, place
from lavis_ds.errors import DataError

_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

Said = list[tuple[Role, str]]


def conversation_of(
    said: Said, kinds: Sequence[Media], *, conversation_id: str, where: str, several_may_lead: bool
) -> Conversation:
    """What was said, with pictures and videos at the markers in the user's turns; markers in other turns are text."""
    texts = [text for role, text in said if role == "user"]
    contents = iter(place(texts, kinds, field="conversations", where=where, several_may_lead=several_may_lead))
    turns = [Turn(role, next(contents) if role == "user" else (Text(text),) if text else ()) for role, text in said]
    references = {"answer": said[-1][1]} if said[-1][0] == "assistant" else None
    return Conversation(conversation_id, tuple(turns), references)


def said_in(item: Mapping[str, Any], where: str) -> Said:
    """Role and text of every turn; a system turn only at the start, then human and gpt by turns, human first.

    Raises:
        DataError: a turn is no turn, or not the one that must follow; the message names it.
    """
    expected = '[{"from": ..., "value": ...}, ...]'
    turns = required(item, "conversations", where, expected)
    if not isinstance(turns, list) or not turns:
        raise DataError("`conversations` is not a list of turns.", where=where, given=repr(turns), expected=expected)
    said: Said = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise DataError(
                f"`{field}` is no turn.", where=where, given=repr(turn), expected='an object with "from" and "value"'
            )
        role = _ROLES.get(str(turn["from"]))
        allowed = _next_roles(said)
        if role is None or role not in allowed:
            names = " or ".join(allowed.values())
            raise DataError(f"`{field}.from` is wrong.", where=where, given=repr(turn["from"]), expected=names)
        said.append((role, text_field(turn["value"], f"{field}.value", where)))
    if not any(role == "user" for role, _ in said):
        raise DataError("`conversations` has no human turn.", where=where, expected="at least one")
    return said


def _next_roles(said: Said) -> dict[Role, str]:
    if not said:
        return {"user": "human", "system": "system"}
    return {"assistant": "gpt"} if said[-1][0] == "user" else {"user": "human"}
