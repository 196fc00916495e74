"""A conversation as the members of a sample, and the extensions that tell members apart."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
from typing import Any

import PIL.Image

from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats import messages
from lavis_ds.errors import DataError

PICTURES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "avif", "heic"})
VIDEOS = frozenset({"mp4", "webm", "mkv", "avi", "mov", "m4v", "mpg", "mpeg", "flv", "wmv", "ts", "3gp"})


def ending(ext: str) -> str:
    """The kind of a member: the last part of its extension, in small letters (`0.JPG` -> `jpg`)."""
    return ext.rpartition(".")[2].lower()


def members_of(conversation: Conversation, key: str) -> list[tuple[str, bytes]]:
    """Name and content of each member: the item in the OpenAI `messages` format, then pictures and videos as they are.

    Raises:
        DataError: a picture or video can't be read or is a folder of frames, or the format can't hold the conversation.
    """
    parts = [part for turn in conversation.turns for part in turn.content if not isinstance(part, Text)]
    media: list[tuple[str, bytes]] = []
    for number, part in enumerate(parts):
        kind, data = _bytes_of(part, conversation.id)
        media.append((f"{key}.{number}.{kind}" if len(parts) > 1 else f"{key}.{kind}", data))
    names = iter([name for name, _ in media])
    item: dict[str, Any] = {
        "id": conversation.id,
        "messages": [_message(turn, [_part(part, names) for part in turn.content]) for turn in conversation.turns],
        "references": conversation.references,
    }
    # What can't be read back is found now: a format may refuse, say, a picture that the assistant shows.
    messages.to_conversation(item, conversation_id="", where=conversation.id, image_root=os.sep)
    return [(f"{key}.json", _json(item, conversation.id)), *media]


def _json(item: dict[str, Any], conversation_id: str) -> bytes:
    try:
        return json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"the references can't be written as JSON: {error}.", where=conversation_id) from error


def _message(turn: Turn, parts: list[dict[str, Any]]) -> dict[str, Any]:
    only_text = len(parts) == 1 and parts[0]["type"] == "text"
    message: dict[str, Any] = {"role": turn.role, "content": parts[0]["text"] if only_text else parts}
    return message if turn.weight == 1.0 else {**message, "weight": turn.weight}


def _part(part: Content, names: Any) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = "image_url" if isinstance(part, Image) else "video_url"
    return {"type": kind, kind: {"url": next(names)}}


def _bytes_of(part: Image | Video, conversation_id: str) -> tuple[str, bytes]:
    """Extension and content."""
    where = f"{conversation_id} ({part.path[:200]})"
    if isinstance(part.data, PIL.Image.Image):
        return "png", _png(part.data, where)
    data = part.data if part.data is not None else _file(part.path, where)
    kind = ending(part.path)
    if isinstance(part, Video):
        return kind if kind in VIDEOS else "mp4", data
    return kind if kind in PICTURES else _picture_kind(data, where), data


def _file(path: str, where: str) -> bytes:
    if path.startswith("data:"):
        try:
            return base64.b64decode(path.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"the data URL can't be decoded: {error}.", where=where) from error
    if os.path.isdir(path):
        raise DataError("a folder of frames can't be put into a shard.", where=where, expected="a video file")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"the file can't be read ({error.strerror}).", where=where) from error


def _png(image: PIL.Image.Image, where: str) -> bytes:
    """Decoded pixels have no original file; PNG keeps them as they are."""
    buffer = io.BytesIO()
    try:
        image.save(buffer, "PNG")
    except OSError as error:
        raise DataError(f"the picture can't be written as PNG: {error}.", where=where) from error
    return buffer.getvalue()


def _picture_kind(data: bytes, where: str) -> str:
    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            kind = (image.format or "").lower()
    except (OSError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"the kind of the picture can't be told: {error}.", where=where) from error
    return {"jpeg": "jpg", "mpo": "jpg", "jpeg2000": "jp2"}.get(kind, kind)
