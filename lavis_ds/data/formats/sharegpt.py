"""Items of ShareGPT files with pictures and videos -> `Conversation`.

Source: data/README.md of https://github.com/hiyouga/LLaMA-Factory (the sharegpt format of multimodal data sets).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats.fields import optional_text
from lavis_ds.data.formats.from_value import conversation_of, said_in
from lavis_ds.data.formats.markers import Media
from lavis_ds.data.formats.media import images_of, videos_of
from lavis_ds.errors import DataError

_UNSUPPORTED = ("tools", "audios")


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Fields: `conversations`, a list of `{"from": "human" | "gpt" | "system", "value": text}`; optionally `system`, the
    system message, and `images` and `videos`, lists of paths. Pictures stand where human turns say `<image>`, videos
    where they say `<video>`; a single one without a marker stands first. Markers in other turns, and those of a kind
    that the item has nothing of, are text.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative paths start from.

    Raises:
        DataError: a field is missing or wrong, or asks for tools or sound; the message names it.
    """
    for field in _UNSUPPORTED:
        if item.get(field):
            raise DataError(f"`{field}` can't be used.", where=where, expected="text, images and videos only")
    said = said_in(item, where)
    system = optional_text(item, "system", where)
    if system and said[0][0] == "system":
        raise DataError("there is a system turn and a field `system`.", where=where, expected="one of the two")
    said = [("system", system), *said] if system else said
    kinds = [
        Media(images_of(item, "images", where, image_root), "<image>", "<image>", "images"),
        Media(videos_of(item, "videos", where, image_root), "<video>", "<video>", "videos"),
    ]
    return conversation_of(said, kinds, conversation_id=conversation_id, where=where, several_may_lead=False)
