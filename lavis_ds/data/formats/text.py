"""Rows of plain text, or of instructions without pictures -> `Conversation`.

Source of the second form: https://github.com/tatsu-lab/stanford_alpaca (README.md, data release).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.formats.fields import optional_text, required_text
from lavis_ds.errors import DataError


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The text as a single assistant turn, or the instruction and its output.

    Fields: `text`; or `instruction` and `output`, optionally with `input`, which follows the instruction after an empty
    line, and `system`. Whatever looks like a marker is text.

    Args:
        item: one row of the file.
        conversation_id: id of the result.
        where: file and row, for messages.
        image_root: not used.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    for field in ("history", "image", "images", "video", "videos"):
        if item.get(field):
            raise DataError(
                f"`{field}` can't be used by this format.",
                where=where,
                hint="The formats `messages` and `sharegpt` have several turns, pictures and videos.",
            )
    if item.get("text") is not None:
        if not (text := required_text(item, "text", where)):
            raise DataError("`text` is empty.", where=where, expected="something to learn")
        return Conversation(conversation_id, (Turn("assistant", (Text(text),)),))
    asked = [required_text(item, "instruction", where), optional_text(item, "input", where)]
    output, system = required_text(item, "output", where), optional_text(item, "system", where)
    turns = (
        *((Turn("system", (Text(system),)),) if system else ()),
        Turn("user", (Text("\n\n".join(text for text in asked if text)),)),
        Turn("assistant", (Text(output),) if output else ()),
    )
    return Conversation(conversation_id, turns, {"answer": output})
