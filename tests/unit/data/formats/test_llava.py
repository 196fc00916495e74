from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats.llava import to_conversation
from lavis_ds.errors import DataError


def convert(*said: tuple[Any, Any], **item: Any) -> Conversation:
    item["conversations"] = [{"from": role, "value": value} for role, value in said]
    return to_conversation(item, conversation_id="c", where="a.json: item 3", image_root="/data")


def test_pictures_stand_at_the_markers_of_human_turns_only() -> None:
    result = convert(
        ("system", "Be <image> kind."),
        ("human", "<image>\nWhat?"),
        ("gpt", "An <image>."),
        ("human", "And\n<image>"),
        ("gpt", "A dog."),
        image=["1.jpg", "/2.jpg"],
    )
    assert result.turns == (
        Turn("system", (Text("Be <image> kind."),)),
        Turn("user", (Image("/data/1.jpg"), Text("\nWhat?"))),
        Turn("assistant", (Text("An <image>."),)),
        Turn("user", (Text("And\n"), Image("/2.jpg"))),
        Turn("assistant", (Text("A dog."),)),
    )
    assert result.references == {"answer": "A dog."}


def test_one_picture_without_marker_stands_first_in_the_first_human_turn() -> None:
    result = convert(("system", "s"), ("human", "What?"), ("gpt", "A cat."), image="1.jpg")
    assert result.turns[1] == Turn("user", (Image("/data/1.jpg"), Text("What?")))


def test_videos_and_pictures_stand_at_their_own_markers() -> None:
    result = convert(("human", "<video> like <image>?"), ("gpt", "x"), image="1.jpg", video="1.mp4")
    assert result.turns[0].content == (Video("/data/1.mp4"), Text(" like "), Image("/data/1.jpg"), Text("?"))


@pytest.mark.parametrize("marker", ["<video>", "<image>"])
def test_an_item_with_a_video_alone_may_mark_it_either_way(marker: str) -> None:
    result = convert(("human", f"{marker}\nWhat?"), ("gpt", "x"), video="1.mp4")
    assert result.turns[0].content == (Video("/data/1.mp4"), Text("\nWhat?"))


def test_a_marker_of_a_kind_that_the_item_lacks_is_text() -> None:
    result = convert(("human", "<image> <video>"), ("gpt", "x"), image="1.jpg")
    assert result.turns[0].content == (Image("/data/1.jpg"), Text(" <video>"))


def test_text_only_items_keep_markers_as_text() -> None:
    result = convert(("human", "What does <image> mean?"), ("gpt", "A placeholder."))
    assert result.images == ()
    assert result.turns[0].text == "What does <image> mean?"


def test_a_question_without_answer_is_kept_for_generation() -> None:
    result = convert(("human", "What?"))
    assert [turn.role for turn in result.turns] == ["user"]
    assert result.references is None


@pytest.mark.parametrize(
    ("said", "image", "message"),
    [
        ([("human", "<image><image>"), ("gpt", "x")], "1.jpg", "2 marker(s) <image>, but `image` has 1"),
        ([("human", "<image>"), ("gpt", "x")], ["1.jpg", "2.jpg"], "1 marker(s) <image>, but `image` has 2"),
        ([("human", "x"), ("gpt", "x")], ["1.jpg", "2.jpg"], "0 marker(s) <image>, but `image` has 2"),
        ([("human", "x"), ("bot", "x")], None, "`conversations[1].from` is wrong"),
        ([("gpt", "x"), ("human", "x")], None, "`conversations[0].from` is wrong"),
        ([("human", "x"), ("human", "x")], None, "`conversations[1].from` is wrong. Given: 'human'. Expected: gpt"),
        ([("human", 7), ("gpt", "x")], None, "`conversations[0].value` is not text"),
        ([("human", ["x"]), ("gpt", "x")], None, "`conversations[0].value` is not text"),
        ([(["human"], "x")], None, "`conversations[0].from` is wrong"),
        ([], None, "`conversations` is not a list of turns"),
        ([("system", "x")], None, "no human turn"),
    ],
)
def test_bad_items_name_file_item_and_field(said: list[tuple[Any, Any]], image: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(*said, image=image)
    assert message in str(caught.value)
    assert "a.json: item 3" in str(caught.value)


@pytest.mark.parametrize("turn", ["hello", {"value": "x"}, {"from": "human"}])
def test_a_turn_must_be_an_object_with_its_two_fields(turn: Any) -> None:
    with pytest.raises(DataError, match=r"`conversations\[0\]` is no turn"):
        to_conversation({"conversations": [turn]}, conversation_id="c", where="f", image_root=None)
