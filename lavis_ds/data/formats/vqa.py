"""Questions about pictures with short answers -> `Conversation`.

Source: the data format section of https://visualqa.org/download.html (VQA v2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.formats.coco_captions import entries
from lavis_ds.data.formats.fields import optional_text, required, required_text, text_field
from lavis_ds.data.formats.media import image_of
from lavis_ds.errors import DataError


def joined(
    questions: Any, annotations: Any | None, *, questions_path: str, annotations_path: str, image_file: str
) -> Iterator[dict[str, Any]]:
    """Rows, in the order of the questions, from VQA v2's pair of files.

    Args:
        questions: content of the questions file.
        annotations: content of the annotations file; None where answers are not public.
        questions_path: for messages.
        annotations_path: for messages.
        image_file: the picture's file, such as `COCO_val2014_{image_id:012d}.jpg`.

    Raises:
        DataError: a field is missing or wrong, or a question has no annotation.
    """
    answers = {
        required(annotation, "question_id", where, "a number"): annotation
        for where, annotation in (
            entries(annotations, "annotations", annotations_path) if annotations is not None else ()
        )
    }
    for where, question in entries(questions, "questions", questions_path):
        question_id = required(question, "question_id", where, "a number")
        if annotations is not None and question_id not in answers:
            raise DataError(
                f"the question has no annotation in {annotations_path}.",
                where=where,
                given=f"question_id {question_id}",
            )
        image_id = required(question, "image_id", where, "a number")
        try:
            image = image_file.format(image_id=image_id)
        except ValueError as error:
            raise DataError(
                f"`image_file` does not fit the picture's id: {error}.", where=where, given=repr(image_id)
            ) from None
        yield {**answers.get(question_id, {}), **question, "id": question_id, "image": image}


def to_conversation(
    item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None, prompt: str
) -> Conversation:
    """The picture with the question, and the answer that most people gave.

    Fields: `image`, `question`; `answer`, or `answers`, a list of strings or of `{"answer": ...}`, with
    `multiple_choice_answer` where one of them was chosen; optionally `question_type` and `answer_type`. Without an
    answer the conversation ends with the question.

    Args:
        item: one row of the file.
        conversation_id: id of the result.
        where: file and row, for messages.
        image_root: folder that relative paths start from.
        prompt: what the user says, with `{question}` in the question's place.

    Raises:
        DataError: a field is missing or wrong; the message names it.
    """
    question = required_text(item, "question", where)
    image = image_of(required(item, "image", where, "a path"), "image", where, image_root)
    asked = Turn("user", (image, Text(prompt.replace("{question}", question))))
    answers = _answers(item, where)
    if not answers:
        return Conversation(conversation_id, (asked,))
    answer = optional_text(item, "multiple_choice_answer", where) or _most_common(answers)
    kinds = {name: text for name in ("question_type", "answer_type") if (text := optional_text(item, name, where))}
    references = {"answer": answer, "answers": answers, **kinds}
    return Conversation(conversation_id, (asked, Turn("assistant", (Text(answer),))), references)


def _answers(item: Mapping[str, Any], where: str) -> list[str]:
    if item.get("answers") is None:
        return [required_text(item, "answer", where)] if item.get("answer") is not None else []
    values = item["answers"]
    if not isinstance(values, list) or not values:
        raise DataError("`answers` is not a list of answers.", where=where, given=repr(values), expected="at least one")
    return [
        text_field(value.get("answer") if isinstance(value, Mapping) else value, f"answers[{number}]", where)
        for number, value in enumerate(values)
    ]


def _most_common(answers: Sequence[str]) -> str:
    """The first of those that were given most often."""
    return Counter(answers).most_common(1)[0][0]
