from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats.messages import to_conversation
from lavis_ds.errors import DataError

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def convert(*messages: Any) -> Conversation:
    item = {"messages": list(messages)}
    return to_conversation(item, conversation_id="c", where="a.jsonl: line 3", image_root="/data")


def message(role: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ANSWER = message("assistant", "x")


def test_parts_keep_their_order_and_text_is_text() -> None:
    parts = [
        {"type": "text", "text": "<image> "},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "image_url", "image_url": "1.jpg"},
        {"type": "text", "text": ""},
        {"type": "image", "image": "file:///2.jpg"},
        {"type": "video", "video": "1.mp4"},
        {"type": "video_url", "video_url": {"url": "/2.mp4"}},
        {"type": "text", "text": "What?"},
    ]
    result = convert(message("system", "Be kind."), message("user", parts), ANSWER)
    assert result.turns == (
        Turn("system", (Text("Be kind."),)),
        Turn(
            "user",
            (
                Text("<image> "),
                Image(PIXEL),
                Image("/data/1.jpg"),
                Image("/2.jpg"),
                Video("/data/1.mp4"),
                Video("/2.mp4"),
                Text("What?"),
            ),
        ),
        Turn("assistant", (Text("x"),)),
    )
    assert result.references == {"answer": "x"}


def test_weights_reach_their_turns() -> None:
    result = convert(
        message("user", "a"),
        message("assistant", "b", weight=0),
        message("user", "c"),
        message("assistant", "d", weight=0.5),
    )
    assert [turn.weight for turn in result.turns] == [1, 0, 1, 0.5]


def test_empty_cells_of_tables_are_no_fields() -> None:
    part = {"type": "image", "image": {"bytes": b"abc", "path": "1.jpg"}, "text": None, "fps": None}
    result = convert(message("user", [part], weight=None, tool_calls=None), ANSWER)
    assert result.turns[0] == Turn("user", (Image("a.jsonl: line 3: 1.jpg", b"abc"),))


def test_a_question_without_answer_is_kept_for_generation() -> None:
    assert convert(message("user", "a")).references is None


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "`messages` is not a list of messages"),
        (["x"], "`messages[0]` is no message"),
        ([ANSWER], "`messages[0].role` is wrong. Given: 'assistant'. Expected: user or system"),
        ([message("user", "x"), message("tool", "x")], "`messages[1].role` is wrong"),
        ([message("user", "x"), message("user", "x")], "`messages[1].role` is wrong"),
        ([message(["user"], "x")], "`messages[0].role` is wrong"),
        ([message("system", "x")], "no user message"),
        ([message("user", None)], "messages[0]: `content` is missing"),
        ([message("user", 7)], "`messages[0].content` is not text"),
        ([message("user", ["x"])], "`messages[0].content[0]` is no part"),
        ([message("user", [{"type": "input_audio"}])], "`messages[0].content[0]` is no part"),
        ([message("user", [{"type": "image"}])], "messages[0].content[0]: `image` is missing"),
        ([message("user", [{"type": "video", "video": "1.mp4", "fps": 2}])], "options that can't be set"),
        ([message("user", [{"type": "video", "video": ["1.jpg", "2.jpg"]}])], "`messages[0].content[0].video` is not"),
        ([message("user", [{"type": "image_url", "image_url": {"url": "https://a.org/1.jpg"}}])], "Download it first"),
        ([message("user", "x"), message("assistant", [{"type": "image", "image": "1.jpg"}])], "in user messages only"),
        ([message("user", "x"), message("assistant", "x", tool_calls=[{}])], "`messages[1].tool_calls` can't be used"),
        ([message("user", "x"), message("assistant", "x", weight=-1)], "`messages[1].weight` is wrong"),
        ([message("user", "x"), message("assistant", "x", weight=True)], "`messages[1].weight` is wrong"),
        ([message("user", "x"), message("assistant", "x", weight=float("nan"))], "`messages[1].weight` is wrong"),
    ],
)
def test_bad_items_are_named(messages: list[Any], complaint: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(*messages)
    assert complaint in str(caught.value)
    assert "a.jsonl: line 3" in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(DataError, match=r"`messages` is missing\. Given: fields conversations"):
        to_conversation({"conversations": []}, conversation_id="c", where="f", image_root=None)
