from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import VideoConfig
from lavis_ds.data.builders import llava_json
from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.data.processors.open_image import open_image
from lavis_ds.data.video import expand
from lavis_ds.errors import ConfigError, DataError

DATA = Path(__file__).parents[3] / "data" / "formats"


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


def test_a_split_without_files_or_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"annotations\.train: the list of files is empty"):
        builder("vqa", annotations={"train": []}).build("train")
    (tmp_path / "a.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(DataError, match=r"a\.json: the annotation file holds no items"):
        builder("coco_captions", annotations={"train": str(tmp_path / "a.json")}).build("train")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.json: there is no such annotation file"):
        builder("llava_json", annotations={"train": str(tmp_path / "missing.json")}).build("train")
    with pytest.raises(DataError, match="image_root: there is no such folder"):
        builder("llava_json", annotations={"train": "a.json"}, image_root=str(tmp_path / "none")).build("train")


# Checking


def test_all_wrong_items_are_counted_and_the_first_few_shown(tmp_path: Path) -> None:
    items = [item for number in range(8) for item in (llava(f"good {number}"), llava(number))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, items)))
    with pytest.raises(DataError) as caught:
        builder("llava_json", annotations={"train": str(tmp_path / "a.jsonl")}).build("train")
    message = str(caught.value)
    assert message.startswith("8 of 16 items are wrong:\n")
    assert message.count("is not text") == 5
    assert "a.jsonl: line 2: `conversations[0].value` is not text" in message
    assert message.endswith("and 3 more")


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places of the items that were converted so far."""
    places: list[str] = []
    original = llava_json.LlavaJson.to_conversation

    def to_conversation(self: Any, item: Any, **given: Any) -> Any:
        places.append(given["where"])
        return original(self, item, **given)

    monkeypatch.setattr(llava_json.LlavaJson, "to_conversation", to_conversation)
    return places


def test_items_are_checked_once_for_the_same_files_and_options(tmp_path: Path, converted: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(llava(f"{number}", image="1.jpg")) for number in range(3)))

    def checked(**options: Any) -> int:
        converted.clear()
        builder("llava_json", annotations={"train": str(path)}, **options).build("train")
        return len(converted)

    root, vis_processor = str(tmp_path), {"train": {"name": "image_train", "image_size": 32}}
    assert checked(image_root=root) == 3
    assert checked(image_root=root) == 0
    assert checked(image_root=root, vis_processor=vis_processor, repeat=2) == 0
    with pytest.raises(DataError, match="3 of 3 items are wrong"):
        checked()  # without `image_root` the same items are wrong
    path.write_text(path.read_text() + "\n" + json.dumps(llava("new")))
    assert checked(image_root=root) == 4


def test_wrong_items_are_refused_again_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([llava(5)]))
    for _ in range(2):
        with pytest.raises(DataError, match="item 0"):
            builder("llava_json", annotations={"train": str(tmp_path / "a.json")}).build("train")


def test_a_few_wrong_items_are_told_and_wait_for_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(llava(f"{n}" if n != 3 else n)) for n in range(10)))
    made = builder("llava_json", annotations={"train": str(path)})
    made.max_bad_fraction = 0.1
    conversations = made.build("train")
    assert len(conversations) == 10
    with pytest.raises(DataError, match=r"a\.jsonl: line 4"):
        conversations[3]
    (notice,) = made.notices
    assert "left out: 1 of 10 items are wrong" in notice
    made.max_bad_fraction = 0.05  # what was found is remembered, not what was allowed
    with pytest.raises(DataError, match=r"a\.jsonl: line 4"):
        made.build("train")


def test_conversations_reach_a_process_that_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([llava("one"), llava("two")]))
    samples = builder("llava_json", annotations={"train": str(tmp_path / "a.json")}).build("train")
    assert list(pickle.loads(pickle.dumps(samples))) == list(samples)


# COCO captions and VQA v2


def test_vqa_files_may_come_in_any_order_and_must_be_a_pair(tmp_path: Path) -> None:
    questions, annotations = str(DATA / "vqa_questions.json"), str(DATA / "vqa_annotations.json")
    options = {"image_root": str(DATA / "images"), "image_file": {"val": "COCO_val2014_{image_id:012d}.jpg"}}

    def answers(*paths: str, split: str = "val") -> list[Any]:
        samples = builder("vqa", annotations={split: list(paths)}, **options).build(split)
        return [(sample.references or {}).get("answer") for sample in samples]

    assert answers(questions, annotations) == answers(annotations, questions) == ["yes", "grey"]
    assert answers(questions) == [None, None]
    for wrong in ([annotations], [questions, questions], [questions, str(DATA / "coco_captions.json"), annotations]):
        with pytest.raises(DataError, match="no pair of VQA v2 files"):
            answers(*wrong)
    with pytest.raises(ConfigError, match=r"image_file: .*how the pictures of 'train' are called"):
        answers(questions, annotations, split="train")
    with pytest.raises(DataError, match="there is no such annotation file"):
        answers(str(tmp_path / "q.json"))


@pytest.mark.parametrize("pattern", ["a.jpg", "{image_id:q}.jpg", "{id}.jpg", "{image_id.x}"])
def test_image_file_must_tell_pictures_apart(pattern: str) -> None:
    with pytest.raises(ConfigError, match="image_file"):
        builder("vqa", image_file=pattern)


def test_coco_splits_that_are_not_trained_on_have_one_sample_a_picture() -> None:
    files = {split: str(DATA / "coco_captions.json") for split in ("train", "val")}
    made = builder("coco_captions", annotations=files, image_root=str(DATA / "images"), prompt="")
    assert [sample.id for sample in made.build("train")] == ["train/0:1", "train/1:2", "train/2:2"]
    assert [(sample.references or {})["captions"] for sample in made.build("val")] == [
        ["A dark square."],
        ["A grey square.", "Something grey."],
    ]


# Every format's committed sample

SAMPLES: list[tuple[str, list[str], int, dict[str, Any]]] = [
    ("minigpt4qwen_json", ["minigpt4qwen.json"], 4, {}),
    ("llava_json", ["llava.json"], 4, {}),
    ("messages", ["messages.jsonl"], 3, {}),
    ("sharegpt", ["sharegpt.json"], 2, {}),
    ("captions", ["captions.jsonl"], 2, {}),
    ("captions", ["captions.parquet"], 2, {}),
    ("coco_captions", ["coco_captions.json"], 3, {}),
    ("vqa", ["vqa_questions.json", "vqa_annotations.json"], 2, {"image_file": "COCO_val2014_{image_id:012d}.jpg"}),
    ("vqa", ["vqa.jsonl"], 2, {}),
    ("text", ["text.jsonl"], 3, {}),
]


@pytest.mark.parametrize(("kind", "files", "count", "options"), SAMPLES, ids=[f"{s[0]}-{s[1][0]}" for s in SAMPLES])
def test_the_sample_of_every_format_is_read_with_its_pictures(
    kind: str, files: list[str], count: int, options: dict[str, Any]
) -> None:
    paths = [str(DATA / name) for name in files]
    made = builder(kind, annotations={"train": paths}, image_root=str(DATA / "images"), **options)
    samples = made.build("train")
    assert (len(samples), made.files("train")) == (count, paths)
    for sample in samples:
        shown = expand(sample, VideoConfig(num_frames=2))
        assert all(open_image(image).size in ((8, 8), (32, 16)) for image in shown.images)
        assert any(turn.role == "assistant" and turn.text for turn in sample.turns)
        assert len(shown.images) >= len(sample.images) > 0 or kind in ("text", *MIXED)


MIXED = ("minigpt4qwen_json", "llava_json", "messages")
"""Formats whose sample has items without pictures."""


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])
def test_every_container_serves_every_format(tmp_path: Path, ending: str) -> None:
    items = json.loads((DATA / "sharegpt.json").read_text())
    expected = builder("sharegpt", annotations={"t": str(DATA / "sharegpt.json")}, image_root="/").build("t")
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        fields = {field: None for item in items for field in item}
        datasets.Dataset.from_list([{**fields, **item} for item in items]).to_parquet(path)
    else:
        path.write_text(json.dumps(items) if ending == "json" else "\n".join(map(json.dumps, items)))
    assert list(builder("sharegpt", annotations={"t": str(path)}, image_root="/").build("t")) == list(expected)
