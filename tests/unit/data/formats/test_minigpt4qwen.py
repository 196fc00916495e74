from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats.minigpt4qwen import to_conversation
from lavis_ds.errors import DataError


def convert(**item: Any) -> Conversation:
    return to_conversation(item, conversation_id="c", where="a.json: item 3 (id x)", image_root="/data")


def user(*parts: Text | Image | Video) -> Turn:
    return Turn("user", parts)


def test_picture_stands_before_the_instruction_where_no_marker_says_otherwise() -> None:
    result = convert(image="a/1.jpg", instruction="What is it?", output="A cat.")
    assert result.turns == (user(Image("/data/a/1.jpg"), Text("What is it?")), Turn("assistant", (Text("A cat."),)))
    assert result.id == "c"
    assert result.references == {"answer": "A cat."}


@pytest.mark.parametrize("marker", ["<ImageHere>", "<Img><ImageHere></Img>"])
def test_picture_stands_at_its_marker(marker: str) -> None:
    result = convert(image="1.jpg", instruction=f"Look: {marker} What is it?", output="A cat.")
    assert result.turns[0] == user(Text("Look: "), Image("/data/1.jpg"), Text(" What is it?"))


def test_turns_and_pictures_of_lists_keep_their_order() -> None:
    result = convert(
        image=["/abs/1.jpg", "2.jpg"],
        instruction=["<ImageHere> one", "two <Img><ImageHere></Img>"],
        output=["first", "second"],
    )
    assert result.turns[0] == user(Image("/abs/1.jpg"), Text(" one"))
    assert result.turns[2] == user(Text("two "), Image("/data/2.jpg"))
    assert [turn.text for turn in result.turns[1::2]] == ["first", "second"]


def test_several_pictures_without_markers_stand_first() -> None:
    result = convert(image=["1.jpg", "2.jpg"], instruction=["one", "two"], output=["a", "b"])
    assert result.turns[0] == user(Image("/data/1.jpg"), Image("/data/2.jpg"), Text("one"))
    assert result.turns[2] == user(Text("two"))


def test_videos_stand_at_the_same_markers() -> None:
    result = convert(video="1.mkv", instruction="Look: <Img><ImageHere></Img> What?", output="Rain.")
    assert result.turns[0] == user(Text("Look: "), Video("/data/1.mkv"), Text(" What?"))
    assert convert(video=["1.mkv"], image="", instruction="What?", output="x").turns[0] == user(
        Video("/data/1.mkv"), Text("What?")
    )


def test_markers_are_text_in_outputs_and_in_items_without_picture() -> None:
    text_only = convert(instruction="Explain <ImageHere>", output="It is <ImageHere>")
    assert text_only.images == ()
    assert [turn.text for turn in text_only.turns] == ["Explain <ImageHere>", "It is <ImageHere>"]
    assert convert(image="1.jpg", instruction="x", output="<ImageHere>").turns[1].text == "<ImageHere>"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"output": "x"}, "`instruction` is missing"),
        ({"instruction": "x"}, "`output` is missing"),
        ({"instruction": ["a", "b"], "output": ["x"]}, "2 instruction(s), 1 output(s)"),
        ({"instruction": [], "output": []}, "`instruction` is an empty list"),
        ({"instruction": ["a", 5], "output": ["x", "y"]}, "`instruction[1]` is not text"),
        ({"instruction": None, "output": "x"}, "`instruction` is missing"),
        ({"instruction": 7, "output": "x"}, "`instruction` is not text"),
        ({"instruction": "a", "output": "x", "image": 7}, "`image` is not text"),
        ({"instruction": "<ImageHere><ImageHere>", "output": "x", "image": "1.jpg"}, "2 marker(s) <ImageHere>"),
        ({"instruction": "<ImageHere>", "output": "x", "image": ["1.jpg", "2.jpg"]}, "`image` has 2 entry(s)"),
        ({"instruction": "<ImageHere><ImageHere>", "output": "x", "video": "1.mp4"}, "`video` has 1 entry(s)"),
        ({"instruction": "a", "output": "x", "video": "1.mp4", "image": "1.jpg"}, "both `image` and `video`"),
    ],
)
def test_bad_items_name_file_item_and_field(item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        convert(**item)
    assert message in str(caught.value)
    assert "a.json: item 3 (id x)" in str(caught.value)


def test_a_relative_path_needs_a_root() -> None:
    item = {"image": "1.jpg", "instruction": "a", "output": "b"}
    with pytest.raises(DataError, match="image_root"):
        to_conversation(item, conversation_id="c", where="f", image_root=None)
