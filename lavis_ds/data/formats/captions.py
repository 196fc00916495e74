"""Rows with a picture and its caption -> `Conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn
from lavis_ds.data.formats.fields import required, text_field
from lavis_ds.data.formats.media import image_of
from lavis_ds.errors import DataError


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None, prompt: str
) -> Conversation:
    """The prompt with the picture, and the caption as its answer.

    Fields: `image` and `caption`, or `text` in its place.

    Args:
        item: one row of the file.
        conversation_id: id of the result.
        where: file and row, for messages.
        image_root: folder that relative paths start from.
        prompt: what the user says; may be empty.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    field = "caption" if item.get("caption") is not None or item.get("text") is None else "text"
    caption = text_field(required(item, field, where), field, where)
    if not caption.strip():
        raise DataError(f"`{field}` is empty.", where=where, expected="a caption")
    image = image_of(required(item, "image", where, "a path"), "image", where, image_root)
    return captioned(conversation_id, image, prompt, [caption], [caption])


def captioned(
    conversation_id: str, image: Image, prompt: str, targets: Sequence[str], references: Sequence[str]
) -> Conversation:
    """A turn pair for each of `targets`, the picture in the first; judged by all `references`."""
    asked: tuple[Content, ...] = (Text(prompt),) if prompt else ()
    turns: list[Turn] = []
    for caption in targets:
        turns += [Turn("user", asked if turns else (image, *asked)), Turn("assistant", (Text(caption),))]
    return Conversation(conversation_id, tuple(turns), {"answer": targets[0], "captions": list(references)})
