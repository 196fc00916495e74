"""COCO captions -> one item a caption or a picture -> `Conversation`.

Source: the captioning section of https://cocodataset.org/#format-data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats.captions import captioned
from lavis_ds.data.formats.fields import required, required_text
from lavis_ds.data.formats.media import image_of
from lavis_ds.errors import DataError

Samples = Literal["caption", "picture", "turns"]


def items(document: Any, path: str, samples: Samples) -> Iterator[dict[str, Any]]:
    """`{"id": ..., "image": ..., "targets": [...], "captions": [...]}` in the order of the file's pictures.

    Args:
        document: the content of the file: `images` with `id` and `file_name`, `annotations` with `image_id` and
            `caption`.
        path: the file, for messages.
        samples: `caption`: one item for each caption; `picture`: one for each picture, its first caption the target;
            `turns`: one for each picture, all captions targets. Pictures without captions are left out.

    Raises:
        DataError: a field is missing or wrong, or a caption belongs to no picture.
    """
    pictures = {
        required(image, "id", where, "a number"): required_text(image, "file_name", where)
        for where, image in entries(document, "images", path)
    }
    captions: dict[Any, list[str]] = {}
    for where, annotation in entries(document, "annotations", path):
        picture = required(annotation, "image_id", where, "the `id` of one of `images`")
        if picture not in pictures:
            raise DataError("the caption belongs to no picture of the file.", where=where, given=f"image_id {picture}")
        captions.setdefault(picture, []).append(required_text(annotation, "caption", where).strip())
    for picture, file_name in pictures.items():
        own = captions.get(picture, [])
        chosen = {"caption": [[caption] for caption in own], "picture": [own[:1]], "turns": [own]}[samples]
        for targets in chosen if own else ():
            yield {"id": picture, "image": file_name, "targets": targets, "captions": own}


def entries(document: Any, field: str, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and content of every object in the list `document[field]`.

    Raises:
        DataError: there is no such list, or something in it is no object.
    """
    values = document.get(field) if isinstance(document, Mapping) else None
    if not isinstance(values, list):
        raise DataError(f"the file has no list `{field}`.", where=path, expected=f'{{"{field}": [...], ...}}')
    for number, value in enumerate(values):
        where = f"{path}: {field}[{number}]"
        if not isinstance(value, Mapping):
            raise DataError("the entry is no object.", where=where, given=repr(value)[:80])
        yield where, value


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None, prompt: str
) -> Conversation:
    """The conversation of one of `items`; its references are all captions of the picture.

    Args:
        item: made by `items`.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that holds the pictures.
        prompt: what the user says; may be empty.
    """
    image = image_of(item["image"], "file_name", where, image_root)
    return captioned(conversation_id, image, prompt, item["targets"], item["captions"])
