from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats.sharegpt import to_conversation
from lavis_ds.errors import DataError


def convert(*said: tuple[Any, Any], **item: Any) -> Conversation:
    item["conversations"] = [{"from": role, "value": value} for role, value in said]
    return to_conversation(item, conversation_id="c", where="a.json: item 3", image_root="/data")


def test_pictures_and_videos_stand_at_the_markers_of_human_turns() -> None:
    result = convert(
        ("human", "<image><video>What?"),
        ("gpt", "<image> it is."),
        ("human", "And <image>"),
        ("gpt", "x"),
        images=["1.jpg", "2.jpg"],
        videos=["1.mp4"],
        system="Be <image> kind.",
    )
    assert result.turns == (
        Turn("system", (Text("Be <image> kind."),)),
        Turn("user", (Image("/data/1.jpg"), Video("/data/1.mp4"), Text("What?"))),
        Turn("assistant", (Text("<image> it is."),)),
        Turn("user", (Text("And "), Image("/data/2.jpg"))),
        Turn("assistant", (Text("x"),)),
    )
    assert result.references == {"answer": "x"}


def test_empty_fields_of_tables_are_no_fields() -> None:
    result = convert(("human", "<image>"), ("gpt", "x"), images=[], videos=None, system="", tools=None)
    assert result.turns[0] == Turn("user", (Text("<image>"),))


@pytest.mark.parametrize(
    ("said", "item", "message"),
    [
        ([("human", "<image>"), ("gpt", "x")], {"images": ["1", "2"]}, "1 marker(s) <image>, but `images` has 2"),
        ([("human", "<video>"), ("gpt", "x")], {"videos": ["1", "2"]}, "1 marker(s) <video>, but `videos` has 2"),
        ([("human", "x"), ("gpt", "x")], {"tools": "[...]"}, "`tools` can't be used"),
        ([("human", "x"), ("gpt", "x")], {"audios": ["1"]}, "`audios` can't be used"),
        ([("human", "x"), ("function_call", "x")], {}, "`conversations[1].from` is wrong"),
        ([("system", "x"), ("human", "x")], {"system": "y"}, "a system turn and a field `system`"),
        ([("human", "x")], {"system": 5}, "`system` is not text"),
    ],
)
def test_bad_items_are_named(said: list[tuple[Any, Any]], item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(*said, **item)
    assert message in str(caught.value)
    assert "a.json: item 3" in str(caught.value)
