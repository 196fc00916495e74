"""Items of MiniGPT4Qwen / MPP-LLaVA annotation files -> `Conversation`.

Source: the data format section of https://github.com/Coobiw/MPP-LLaVA (README.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.formats.fields import text_list
from lavis_ds.data.formats.markers import Media, place
from lavis_ds.data.formats.media import images_of, videos_of
from lavis_ds.errors import DataError

_MARKER = r"<Img><ImageHere></Img>|<ImageHere>"


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Fields: `instruction` and `output`, each a string or a list of turns; optionally `image` or `video`, a path or a
    list of paths. Pictures or videos stand where the instructions say `<ImageHere>` or `<Img><ImageHere></Img>`, else
    before the first instruction. Markers in outputs, and those of items without either, are text.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative paths start from.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    questions, answers = text_list(item, "instruction", where), text_list(item, "output", where)
    if len(questions) != len(answers):
        raise DataError(
            "`instruction` and `output` differ in length.",
            where=where,
            given=f"{len(questions)} instruction(s), {len(answers)} output(s)",
            expected="one output for each instruction",
        )
    contents = place(
        questions, [_media(item, where, image_root)], field="instruction", where=where, several_may_lead=True
    )
    turns: list[Turn] = []
    for content, answer in zip(contents, answers, strict=True):
        turns += [Turn("user", content), Turn("assistant", (Text(answer),) if answer else ())]
    return Conversation(conversation_id, tuple(turns), references={"answer": answers[-1]})


def _media(item: Mapping[str, Any], where: str, image_root: str | None) -> Media:
    """Pictures and videos share one marker, so an item may have one kind only."""
    images, videos = images_of(item, "image", where, image_root), videos_of(item, "video", where, image_root)
    if images and videos:
        raise DataError(
            "the item has both `image` and `video`, which share one marker.",
            where=where,
            expected="one of the two",
            hint="Write the item in the format `messages` or `sharegpt`, which can have both.",
        )
    return Media(videos or images, _MARKER, "<ImageHere>", "video" if videos else "image")
