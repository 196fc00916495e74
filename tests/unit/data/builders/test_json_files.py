from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.errors import ConfigError, DataError


def builder(kind: str, **options: Any) -> DatasetBuilder:
    config = decode(registry.builders.config_class(kind), {"builder": kind, **options})
    made: DatasetBuilder = registry.builders.get(kind)("mine", config)
    return made


def minigpt(text: str, **more: Any) -> dict[str, Any]:
    return {"instruction": text, "output": "yes", **more}


def llava(text: str, **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}], **more}


@pytest.mark.parametrize(("kind", "item"), [("minigpt4qwen_json", minigpt), ("llava_json", llava)])
def test_files_of_a_split_are_joined_in_order(tmp_path: Path, kind: str, item: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps([item("one", id="x", image="1.jpg"), item("two")]))
    (tmp_path / "b.jsonl").write_text(json.dumps(item("three", id="x")))
    files = {"train": [str(tmp_path / "a.json"), str(tmp_path / "b.jsonl")], "val": str(tmp_path / "b.jsonl")}
    made = builder(kind, annotations=files, image_root=str(tmp_path))
    assert list(made.splits()) == ["train", "val"]
    samples = made.build("train")
    assert [sample.turns[0].text for sample in samples] == ["one", "two", "three"]
    assert [sample.id for sample in samples] == ["train/0:x", "train/1", "train/2:x"]
    assert samples[0].images[0].path == str(tmp_path / "1.jpg")
    assert [sample.id for sample in made.build("val")] == ["val/0:x"]


@pytest.mark.parametrize(("kind", "item"), [("minigpt4qwen_json", minigpt), ("llava_json", llava)])
def test_a_bad_item_is_found_when_the_split_is_built(tmp_path: Path, kind: str, item: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps([item("one"), item(5, id="bad-one")]))
    with pytest.raises(DataError, match=r"a\.json: item 1 \(id bad-one\): `.*` is not text"):
        builder(kind, annotations={"train": str(tmp_path / "a.json")}).build("train")


def test_a_missing_split_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no split 'trian'.*one of train, val.*Did you mean 'train'"):
        builder("llava_json", annotations={"train": "a.json", "val": "b.json"}).build("trian")
    with pytest.raises(ConfigError, match="`annotations` with a file"):
        builder("llava_json").build("train")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.json: there is no such annotation file"):
        builder("llava_json", annotations={"train": str(tmp_path / "missing.json")}).build("train")
    with pytest.raises(DataError, match="image_root: there is no such folder"):
        builder("llava_json", annotations={"train": "a.json"}, image_root=str(tmp_path / "none")).build("train")
