"""Items of LLaVA annotation files -> `Conversation`.

Source: docs/Finetune_Custom_Data.md of https://github.com/haotian-liu/LLaVA; videos as in
https://github.com/LLaVA-VL/LLaVA-NeXT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats.from_value import conversation_of, said_in
from lavis_ds.data.formats.markers import Media
from lavis_ds.data.formats.media import images_of, videos_of


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Fields: `conversations`, a list of `{"from": "human" | "gpt" | "system", "value": text}`; optionally `image` and
    `video`, each a path or a list of paths. Pictures stand where human turns say `<image>`, videos where they say
    `<video>`, or `<image>` in items without pictures; a single one without a marker stands first. Markers in other
    turns, and those of a kind that the item has nothing of, are text.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative paths start from.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    said = said_in(item, where)
    images, videos = images_of(item, "image", where, image_root), videos_of(item, "video", where, image_root)
    video_marker = "<video>" if images else "<video>|<image>"  # LLaVA-NeXT's own video data says <image>
    kinds = [Media(images, "<image>", "<image>", "image"), Media(videos, video_marker, "<video>", "video")]
    return conversation_of(said, kinds, conversation_id=conversation_id, where=where, several_may_lead=False)
