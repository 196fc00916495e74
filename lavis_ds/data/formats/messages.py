"""Items with a list of chat messages -> `Conversation`.

Source: the fine-tuning format of OpenAI (https://platform.openai.com/docs/guides/vision-fine-tuning) and the content
parts of Qwen's vision-language models (https://github.com/QwenLM/Qwen3-VL, README.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from lavis_ds.data.conversation import Content, Conversation, Role, Text, Turn
from lavis_ds.data.formats.fields import required, text_field
from lavis_ds.data.formats.media import image_of, video_of
from lavis_ds.errors import DataError

_ROLES: tuple[Role, ...] = get_args(Role)
_UNSUPPORTED = ("tool_calls", "function_call", "audio")
_IGNORED_KEYS = {"type", "detail"}
"""`detail` tells OpenAI's servers how to scale a picture."""


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
) -> Conversation:
    """The conversation that `item` holds.

    Field: `messages`, a list of `{"role": "system" | "user" | "assistant", "content": ..., "weight": ...}`. A content
    is a string or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`,
    `{"type": "image", "image": ...}`, `{"type": "video", "video": ...}`, `{"type": "video_url", "video_url": ...}`.
    Nothing in a text is a marker. `weight` is a factor of the message's loss; 1 where it is left out.

    Args:
        item: one entry of the file.
        conversation_id: id of the result.
        where: file and item, for messages.
        image_root: folder that relative paths start from.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    expected = '[{"role": ..., "content": ...}, ...]'
    messages = required(item, "messages", where, expected)
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` is not a list of messages.", where=where, given=repr(messages), expected=expected)
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        turns.append(_turn(message, f"messages[{number}]", _next_roles(turns), where, image_root))
    if not any(turn.role == "user" for turn in turns):
        raise DataError("`messages` has no user message.", where=where, expected="at least one")
    references = {"answer": turns[-1].text} if turns[-1].role == "assistant" else None
    return Conversation(conversation_id, tuple(turns), references)


def _next_roles(turns: list[Turn]) -> tuple[Role, ...]:
    if not turns:
        return ("user", "system")
    return ("assistant",) if turns[-1].role == "user" else ("user",)


def _turn(message: Any, field: str, allowed: tuple[Role, ...], where: str, image_root: str | None) -> Turn:
    if not isinstance(message, Mapping):
        raise DataError(
            f"`{field}` is no message.",
            where=where,
            given=repr(message),
            expected='an object with "role" and "content"',
        )
    for name in _UNSUPPORTED:
        if message.get(name):
            raise DataError(f"`{field}.{name}` can't be used.", where=where, expected="text, images and videos only")
    role: Role | None = next((role for role in _ROLES if role == message.get("role")), None)
    if role is None or role not in allowed:
        raise DataError(
            f"`{field}.role` is wrong.", where=where, given=repr(message.get("role")), expected=" or ".join(allowed)
        )
    content = required(message, "content", f"{where}: {field}", "a string or a list of parts")
    return Turn(role, _content(content, role, f"{field}.content", where, image_root), _weight(message, field, where))


def _content(content: Any, role: Role, field: str, where: str, image_root: str | None) -> tuple[Content, ...]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": text_field(content, field, where)}]
    made = [_part(part, f"{field}[{number}]", where, image_root) for number, part in enumerate(parts)]
    if role != "user" and not all(isinstance(part, Text) for part in made):
        raise DataError(f"`{field}` has a picture or a video.", where=where, expected="these in user messages only")
    return tuple(part for part in made if part != Text(""))


def _part(part: Any, field: str, where: str, image_root: str | None) -> Content:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _PARTS:
        raise DataError(
            f"`{field}` is no part that can be used.",
            where=where,
            given=repr(kind if kind is not None else part)[:80],
            expected=f'an object whose "type" is {", ".join(_PARTS)}',
        )
    unknown = {name for name, value in part.items() if value is not None} - {kind} - _IGNORED_KEYS - _PARTS.keys()
    if unknown:
        raise DataError(
            f"`{field}` has options that can't be set for a single part.",
            where=where,
            given=", ".join(sorted(unknown)),
            hint="Leave them out; frames and sizes are options of the dataset (`video`, `vis_processor`).",
        )
    value = required(part, kind, f"{where}: {field}", "the part's content")
    return _PARTS[kind](value, f"{field}.{kind}", where, image_root)


def _text(value: Any, field: str, where: str, image_root: str | None) -> Content:
    return Text(text_field(value, field, where))


def _address(value: Any) -> Any:
    """OpenAI nests the address, `{"url": ...}`; others write it directly."""
    return value["url"] if isinstance(value, Mapping) and value.get("url") is not None else value


def _image(value: Any, field: str, where: str, image_root: str | None) -> Content:
    return image_of(_address(value), field, where, image_root)


def _video(value: Any, field: str, where: str, image_root: str | None) -> Content:
    return video_of(_address(value), field, where, image_root)


_PARTS: dict[str, Callable[[Any, str, str, str | None], Content]] = {
    "text": _text,
    "image_url": _image,
    "image": _image,
    "video": _video,
    "video_url": _video,
}


def _weight(message: Mapping[str, Any], field: str, where: str) -> float:
    weight = message.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise DataError(f"`{field}.weight` is wrong.", where=where, given=repr(weight), expected="a number, 0 or more")
    return float(weight)
