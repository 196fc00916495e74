"""Items of MiniGPT4Qwen / MPP-LLaVA annotation files -> `Conversation`.

Source: the data format section of https://github.com/Coobiw/MPP-LLaVA (README.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.formats.fields import images_of, markers_differ, split_at, text_list
from lavis_ds.errors import DataError

_MARKER = re.compile(r"<Img><ImageHere></Img>|<ImageHere>")


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Fields: `instruction` and `output`, each a string or a list of turns; optionally `image`, a path or a list of paths.
    Pictures stand where the instructions say `<ImageHere>` or `<Img><ImageHere></Img>`, else before the first
    instruction. Markers in outputs, and those of items without pictures, are text.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative image paths start from.

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
    turns: list[Turn] = []
    for content, answer in zip(
        _with_images(questions, images_of(item, where, image_root), where), answers, strict=True
    ):
        turns += [Turn("user", content), Turn("assistant", (Text(answer),) if answer else ())]
    return Conversation(conversation_id, tuple(turns), references={"answer": answers[-1]})


def _with_images(questions: list[str], images: list[Image], where: str) -> list[tuple[Text | Image, ...]]:
    if images:
        markers = sum(len(_MARKER.findall(question)) for question in questions)
        if markers not in (0, len(images)):
            raise markers_differ(markers, len(images), "<ImageHere>", "instruction", where)
        if markers:
            upcoming = iter(images)
            return [split_at(_MARKER, question, upcoming) for question in questions]
    contents: list[tuple[Text | Image, ...]] = [(Text(question),) if question else () for question in questions]
    return [(*images, *contents[0]), *contents[1:]]
