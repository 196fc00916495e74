from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.config.decode import decode
from lavis_ds.config.load import dataset_tree
from lavis_ds.data.builders.easy_vqa import EasyVQA, question_type
from lavis_ds.data.configs import ChatConfig, EasyVQAConfig, ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.conversation import Image, Text, Turn
from lavis_ds.errors import ConfigError, DataError

QUESTIONS = [
    ["what is the blue shape?", "circle", 0],
    ["is there a circle?", "yes", 0],
    ["what color is it?", "red", 1],
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "questions.json").write_text(json.dumps(QUESTIONS))
    return tmp_path


def make(root: Path, **options: Any) -> EasyVQA:
    return EasyVQA("easy_vqa", EasyVQAConfig(root=str(root), **options))


def test_train_has_one_conversation_a_picture_with_all_its_questions(root: Path) -> None:
    first, second = make(root).build("train")
    assert first.id == "train/0"
    assert first.turns == (
        Turn("user", (Image(str(root / "train/images/0.png")), Text("what is the blue shape?"))),
        Turn("assistant", (Text("circle"),)),
        Turn("user", (Text("is there a circle?"),)),
        Turn("assistant", (Text("yes"),)),
    )
    assert len(second.turns) == 2


def test_test_has_one_conversation_a_question_with_references(root: Path) -> None:
    samples = make(root).build("test")
    assert [sample.id for sample in samples] == ["test/0/0", "test/0/1", "test/1/0"]
    assert samples[1].turns[0] == Turn("user", (Image(str(root / "test/images/0.png")), Text("is there a circle?")))
    assert [sample.references for sample in samples] == [
        {"answer": "circle", "question_type": "shape"},
        {"answer": "yes", "question_type": "yes_no"},
        {"answer": "red", "question_type": "color"},
    ]


def test_val_is_the_end_of_train_and_not_in_train(root: Path) -> None:
    builder = make(root, num_val_images=1)
    assert list(builder.splits()) == ["train", "val", "test"]
    assert [sample.id for sample in builder.build("train")] == ["train/0"]
    assert [sample.id for sample in builder.build("val")] == ["val/1/0"]
    assert builder.build("val")[0].images[0].path == str(root / "train/images/1.png")
    assert len(builder.build("test")) == 3


def test_errors_say_what_to_do(root: Path) -> None:
    with pytest.raises(ConfigError, match="no split 'val'"):
        make(root).build("val")
    with pytest.raises(ConfigError, match=r"num_val_images.*Given: 2.*less than the 2 pictures"):
        make(root, num_val_images=2).build("train")
    (root / "test/questions.json").write_text(json.dumps([*QUESTIONS, ["what?", "x", "0"]]))
    with pytest.raises(DataError, match=r"questions\.json: item 3: this is no question"):
        make(root).build("test")
    (root / "test/questions.json").write_text("[")
    with pytest.raises(DataError, match="no valid JSON"):
        make(root).build("test")
    (root / "test/questions.json").unlink()
    with pytest.raises(DataError, match="there is no such file"):
        make(root).build("test")


def test_the_shipped_defaults_evaluate_at_the_size_of_training() -> None:
    config = decode(EasyVQAConfig, dataset_tree("easy_vqa", {"vis_processor": {"train": {"image_size": 32}}}))
    assert config.vis_processor is not None
    assert config.vis_processor.train == ImageTrainConfig(image_size=32, min_scale=1.0)
    assert config.vis_processor.eval == ImageEvalConfig(image_size=32)
    assert config.text_processor.train == ChatConfig(turns="independent", shuffle_turns=True)
    assert config.text_processor.eval == ChatConfig()


def test_without_package_and_root_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install easy-vqa"):
        EasyVQA("easy_vqa", EasyVQAConfig()).build("train")


def test_the_installed_package_is_found_without_importing_it() -> None:
    pytest.importorskip("easy_vqa", reason="needs the easy-vqa package")
    builder = EasyVQA("easy_vqa", EasyVQAConfig(num_val_images=200))
    train, val, test = (builder.build(split) for split in ("train", "val", "test"))
    assert (len(train), len({sample.images[0].path for sample in val}), len(test)) == (3800, 200, 9673)
    assert sum(len(sample.turns) // 2 for sample in train) + len(val) == 38575
    assert not {sample.images[0].path for sample in train} & {sample.images[0].path for sample in val}
    assert os.path.isfile(test[-1].images[0].path)
    by_type = {sample.references["question_type"]: set() for sample in test if sample.references}
    for sample in test:
        assert sample.references is not None
        by_type[sample.references["question_type"]].add(sample.references["answer"])
    assert by_type["yes_no"] == {"yes", "no"}
    assert by_type["shape"] == {"circle", "rectangle", "triangle"}
    assert len(by_type["color"]) == 8


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("what is the color of the triangle?", "color"),
        ("what color is the shape?", "color"),
        ("what shape is present?", "shape"),
        ("what is the teal shape?", "shape"),
        ("is no red shape present?", "yes_no"),
        ("does the image not contain a circle?", "yes_no"),
    ],
)
def test_question_types(question: str, expected: str) -> None:
    assert question_type(question) == expected
