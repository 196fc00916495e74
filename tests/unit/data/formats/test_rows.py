"""The formats whose items are rows: captions, questions and answers, text."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.formats import captions, coco_captions, text, vqa
from lavis_ds.errors import DataError

PLACE: dict[str, Any] = {"conversation_id": "c", "where": "a.jsonl: line 3", "image_root": "/data"}


def pair(*asked: Text | Image, answer: str) -> tuple[Turn, Turn]:
    return Turn("user", asked), Turn("assistant", (Text(answer),))


# Captions


def caption(prompt: str = "Describe.", **item: Any) -> Conversation:
    return captions.to_conversation(item, **PLACE, prompt=prompt)


def test_a_caption_answers_the_prompt() -> None:
    result = caption(image="1.jpg", caption="A <image>.", text="not this")
    assert result.turns == pair(Image("/data/1.jpg"), Text("Describe."), answer="A <image>.")
    assert result.references == {"answer": "A <image>.", "captions": ["A <image>."]}
    assert caption(image="1.jpg", caption=None, text="A cat.").turns[1].text == "A cat."
    assert caption(prompt="", image="1.jpg", text="A cat.").turns == pair(Image("/data/1.jpg"), answer="A cat.")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"image": "1.jpg"}, "`caption` is missing"),
        ({"caption": "x"}, "`image` is missing"),
        ({"image": "1.jpg", "caption": ["a", "b"]}, "`caption` is not text"),
        ({"image": "1.jpg", "text": " "}, "`text` is empty"),
    ],
)
def test_bad_caption_rows_are_named(item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        caption(**item)


COCO: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}, {"id": 3, "file_name": "3.jpg"}],
    "annotations": [
        {"image_id": 3, "caption": "three"},
        {"image_id": 1, "caption": "one\n"},
        {"image_id": 3, "caption": "drei"},
    ],
}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ("caption", [(1, ["one"]), (3, ["three"]), (3, ["drei"])]),
        ("picture", [(1, ["one"]), (3, ["three"])]),
        ("turns", [(1, ["one"]), (3, ["three", "drei"])]),
    ],
)
def test_coco_captions_are_grouped_as_asked(samples: Any, expected: list[tuple[int, list[str]]]) -> None:
    items = list(coco_captions.items(COCO, "a.json", samples))
    assert [(item["id"], item["targets"]) for item in items] == expected
    assert [item["captions"] for item in items if item["id"] == 3] == [["three", "drei"]] * (len(items) - 1)
    made = coco_captions.to_conversation(items[-1], **PLACE, prompt="Describe.")
    targets = expected[-1][1]
    first, *others = targets
    assert made.turns == (
        *pair(Image("/data/3.jpg"), Text("Describe."), answer=first),
        *(turn for other in others for turn in pair(Text("Describe."), answer=other)),
    )
    assert made.references == {"answer": first, "captions": ["three", "drei"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, "a.json: the file has no list `images`"),
        ({"annotations": [5]}, r"a\.json: annotations\[0\]: the entry is no object"),
        ({"annotations": [{"image_id": 9, "caption": "x"}]}, "belongs to no picture"),
        ({"annotations": [{"image_id": 1}]}, "`caption` is missing"),
        ({"images": [{"id": 1}]}, "`file_name` is missing"),
    ],
)
def test_bad_coco_files_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(coco_captions.items({**COCO, **change}, "a.json", "caption"))


# Questions and answers


def ask(prompt: str = "{question}", **item: Any) -> Conversation:
    return vqa.to_conversation(item, **PLACE, prompt=prompt)


def test_the_most_common_answer_is_the_target_and_all_are_references() -> None:
    result = ask(image="1.jpg", question="Color {x}?", answers=["gray", "grey", "grey"], question_type="what color")
    assert result.turns == pair(Image("/data/1.jpg"), Text("Color {x}?"), answer="grey")
    assert result.references == {"answer": "grey", "answers": ["gray", "grey", "grey"], "question_type": "what color"}


def test_a_chosen_answer_and_a_prompt_are_kept() -> None:
    given = [{"answer": "a", "answer_id": 1}, {"answer": "a", "answer_id": 2}, {"answer": "b", "answer_id": 3}]
    result = ask(
        "{question}\nIn one word.",
        image="1.jpg",
        question="Q?",
        answers=given,
        multiple_choice_answer="b",
        answer_type="other",
    )
    assert [turn.text for turn in result.turns] == ["Q?\nIn one word.", "b"]
    assert result.references == {"answer": "b", "answers": ["a", "a", "b"], "answer_type": "other"}


def test_a_single_answer_or_none() -> None:
    assert ask(image="1.jpg", question="Q?", answer="no").references == {"answer": "no", "answers": ["no"]}
    unanswered = ask(image="1.jpg", question="Q?", answer=None)
    assert ([turn.role for turn in unanswered.turns], unanswered.references) == (["user"], None)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"question": "Q?", "answer": "x"}, "`image` is missing"),
        ({"image": "1.jpg", "answer": "x"}, "`question` is missing"),
        ({"image": "1.jpg", "question": "Q?", "answer": 2}, "`answer` is not text"),
        ({"image": "1.jpg", "question": "Q?", "answers": []}, "`answers` is not a list"),
        ({"image": "1.jpg", "question": "Q?", "answers": ["a", {"text": "b"}]}, r"`answers\[1\]` is not text"),
    ],
)
def test_bad_question_rows_are_named(item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(**item)


QUESTIONS: dict[str, Any] = {"questions": [{"question_id": 7, "image_id": 1, "question": "Q?"}]}
ANNOTATIONS: dict[str, Any] = {
    "annotations": [{"question_id": 7, "image_id": 1, "multiple_choice_answer": "b", "answers": [{"answer": "b"}]}]
}


def join(questions: Any, annotations: Any, image_file: str = "p_{image_id:03d}.jpg") -> list[dict[str, Any]]:
    rows = vqa.joined(questions, annotations, questions_path="q.json", annotations_path="a.json", image_file=image_file)
    return list(rows)


def test_the_pair_of_files_is_joined_by_question() -> None:
    (row,) = join(QUESTIONS, ANNOTATIONS)
    made = ask(**row)
    assert made.turns == pair(Image("/data/p_001.jpg"), Text("Q?"), answer="b")
    assert row["id"] == 7
    (unanswered,) = join(QUESTIONS, None)
    assert len(ask(**unanswered).turns) == 1


def test_what_does_not_fit_together_is_named() -> None:
    other = copy.deepcopy(ANNOTATIONS)
    other["annotations"][0]["question_id"] = 8
    with pytest.raises(DataError, match=r"q\.json: questions\[0\]: the question has no annotation in a\.json"):
        join(QUESTIONS, other)
    text_id = {"questions": [{"question_id": 7, "image_id": "x", "question": "Q?"}]}
    with pytest.raises(DataError, match="`image_file` does not fit"):
        join(text_id, None)


# Text


def write(**item: Any) -> Conversation:
    return text.to_conversation(item, **PLACE)


def test_plain_text_is_one_turn() -> None:
    result = write(text="Once <image> upon.", instruction=None)
    assert result.turns == (Turn("assistant", (Text("Once <image> upon."),)),)
    assert result.references is None


def test_instructions_have_input_and_system() -> None:
    result = write(instruction="Translate.", input="<image>", output="x", system="Be kind.")
    assert [(turn.role, turn.text) for turn in result.turns] == [
        ("system", "Be kind."),
        ("user", "Translate.\n\n<image>"),
        ("assistant", "x"),
    ]
    assert result.images == ()
    assert [turn.text for turn in write(instruction="Hi", input="", output="Ho").turns] == ["Hi", "Ho"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": ""}, "`text` is empty"),
        ({"text": 5}, "`text` is not text"),
        ({"output": "x"}, "`instruction` is missing"),
        ({"instruction": "x"}, "`output` is missing"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, "`history` can't be used"),
        ({"text": "x", "image": "1.jpg"}, "`image` can't be used"),
    ],
)
def test_bad_text_rows_are_named(item: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write(**item)
