"""easy-VQA: questions about one coloured shape, with a published test split.

Source: https://github.com/vzhou842/easy-VQA (PyPI easy-vqa, MIT); items of questions.json are
[question, answer, image id].
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any

from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.data.configs import EasyVQAConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.errors import ConfigError, DataError

Question = tuple[str, str]


class EasyVQA(DatasetBuilder):
    """Split `train`: one conversation a picture with all its questions. `val`, `test`: one conversation a question."""

    Config = EasyVQAConfig
    config: EasyVQAConfig

    def splits(self) -> Sequence[str]:
        return ["train", *(["val"] if self.config.num_val_images else []), "test"]

    def build(self, split: str) -> Sequence[Conversation]:
        self.check_split(split)
        folder = os.path.join(self._root(), "test" if split == "test" else "train")
        pictures = _read_questions(os.path.join(folder, "questions.json"))
        names = list(pictures)
        if split != "test":
            names = self._part(names, split)
        if split == "train":
            return [_all_questions(f"train/{n}", _image(folder, n), pictures[n]) for n in names]
        return [
            _one_question(f"{split}/{n}/{k}", _image(folder, n), question, answer)
            for n in names
            for k, (question, answer) in enumerate(pictures[n])
        ]

    def _part(self, images: list[int], split: str) -> list[int]:
        num_train = len(images) - self.config.num_val_images
        if num_train <= 0:
            raise ConfigError(
                "no pictures are left to train on.",
                where=f"datasets.{self.name}.num_val_images",
                given=self.config.num_val_images,
                expected=f"less than the {len(images)} pictures of train",
            )
        return images[:num_train] if split == "train" else images[num_train:]

    def _root(self) -> str:
        if self.config.root is not None:
            return self.config.root
        spec = importlib.util.find_spec("easy_vqa")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                "the package easy-vqa, which holds the data, is not installed.",
                where=f"datasets.{self.name}",
                hint="Run `pip install easy-vqa`, or set `root` to a folder that holds train/ and test/.",
            )
        return os.path.join(spec.submodule_search_locations[0], "data")


def question_type(question: str) -> str:
    """`yes_no`, `color` or `shape`: what the question asks for."""
    if not question.lower().startswith("what"):
        return "yes_no"
    return "color" if question.lower().startswith(("what color", "what is the color")) else "shape"


def _image(folder: str, number: int) -> Image:
    return Image(os.path.join(folder, "images", f"{number}.png"))


def _all_questions(conversation_id: str, image: Image, questions: list[Question]) -> Conversation:
    turns: list[Turn] = []
    for question, answer in questions:
        turns += [Turn("user", (Text(question),)), Turn("assistant", (Text(answer),))]
    turns[0] = Turn("user", (image, *turns[0].content))
    return Conversation(conversation_id, tuple(turns))


def _one_question(conversation_id: str, image: Image, question: str, answer: str) -> Conversation:
    turns = (Turn("user", (image, Text(question))), Turn("assistant", (Text(answer),)))
    return Conversation(conversation_id, turns, {"answer": answer, "question_type": question_type(question)})


def _read_questions(path: str) -> dict[int, list[Question]]:
    """Picture number -> its questions and answers, both in the file's order."""
    try:
        with open(path, encoding="utf-8") as file:
            items = json.load(file)
    except FileNotFoundError:
        raise DataError(
            "there is no such file.", where=path, hint="`root` must hold train/questions.json and test/questions.json."
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(f"this is no valid JSON: {error}.", where=path) from None
    if not isinstance(items, list) or not items:
        raise DataError("the file holds no questions.", where=path, expected="[[question, answer, image id], ...]")
    pictures: dict[int, list[Question]] = {}
    for number, item in enumerate(items):
        question, answer, image = _checked(item, f"{path}: item {number}")
        pictures.setdefault(image, []).append((question, answer))
    return pictures


def _checked(item: Any, where: str) -> tuple[str, str, int]:
    if not (isinstance(item, list) and [type(field) for field in item] == [str, str, int]):
        raise DataError(
            "this is no question.", where=where, given=repr(item)[:120], expected="[question, answer, image id]"
        )
    return item[0], item[1], item[2]
