from __future__ import annotations

import io
import json
import multiprocessing
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lavis_ds import registry
from lavis_ds.builtin import declare
from lavis_ds.config.decode import decode
from lavis_ds.data.builders.webdataset import WebDataset
from lavis_ds.data.configs import WebDatasetConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tar(tmp_path: Path):
    def write(members: Mapping[str, Any], name: str = "000.tar") -> str:
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, content in members.items():
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return str(tmp_path / name)

    return write


def make(paths: str | list[str], **options: Any) -> WebDataset:
    return WebDataset("w", decode(WebDatasetConfig, {"annotations": {"train": paths}, **options}))


def only(path: str, **options: Any) -> Conversation:
    (conversation,) = make(path, **options).build("train")
    return conversation


def test_pictures_with_captions(tar, tmp_path) -> None:
    tar(
        {
            "0001.jpg": b"JPEG",
            "0001.txt": b"A cat.\n",
            "0001.json": {"caption": "not this"},
            "0002.json": {"caption": "A dog."},
            "0002.PNG": b"PNG",
        }
    )
    tar({"a/b.webp": b"WEBP", "a/b.json": {"text": "A cow."}}, "001.tar")
    builder = make(str(tmp_path / "{000..001}.tar"), prompt="Say what you see.")
    first, second, third = builder.build("train")
    assert first == Conversation(
        "train/000/0001",
        (
            Turn("user", (Image("000.tar: 0001.jpg", b"JPEG"), Text("Say what you see."))),
            Turn("assistant", (Text("A cat."),)),
        ),
        {"answer": "A cat.", "captions": ["A cat."]},
    )
    assert (second.id, second.turns[1].text, second.images) == (
        "train/000/0002",
        "A dog.",
        (Image("000.tar: 0002.PNG", b"PNG"),),
    )
    assert (third.id, third.turns[1].text) == ("train/001/a/b", "A cow.")
    assert builder.files("train") == [str(tmp_path / "000.tar"), str(tmp_path / "001.tar")]
    assert builder.build("train")[-1] == third


def test_several_pictures_stand_in_the_order_of_their_numbers(tar) -> None:
    path = tar({"1.txt": b"All.", **{f"1.{n}.jpg": str(n).encode() for n in (10, 2, 0)}, "1.mp4": b"V"})
    assert only(path).turns[0].content == (
        *(Image(f"000.tar: 1.{n}.jpg", str(n).encode()) for n in (0, 2, 10)),
        Video("000.tar: 1.mp4", b"V"),
        Text("Describe the picture."),
    )


@pytest.mark.parametrize("reference", ["7.0.jpg", "0.jpg", "images/7.0.jpg", "/data/images/7.0.jpg"])
def test_items_name_their_pictures(tar, reference) -> None:
    item = {
        "image": [reference, "7.1.jpg"],
        "conversations": [{"from": "human", "value": "<image> <image>?"}, {"from": "gpt", "value": "x"}],
    }
    path = tar({"7.json": item, "7.0.jpg": b"A", "7.1.jpg": b"B"})
    content = only(path, format="llava").turns[0].content
    assert content == (Image("000.tar: 7.0.jpg", b"A"), Text(" "), Image("000.tar: 7.1.jpg", b"B"), Text("?"))


LLAVA = {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "x"}]}
FORMATS = {
    "llava": LLAVA,
    "sharegpt": LLAVA,
    "minigpt4qwen": {"instruction": "<ImageHere>What?", "output": "x"},
    "messages": {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "x"}]},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("field", [{}, {"image": "coco/17.jpg"}, {"images": ["coco/17.jpg"]}])
def test_a_single_picture_needs_no_name_or_may_have_another_one(tar, name, field) -> None:
    conversation = only(tar({"7.json": {**FORMATS[name], **field}, "7.jpg": b"A"}), format=name)
    assert conversation.turns[0].content[0] == Image("000.tar: 7.jpg", b"A")
    assert conversation.turns[0].text.strip() == "What?"
    assert len(conversation.images) == 1


def test_messages_with_pictures_videos_and_data_urls(tar) -> None:
    url = "data:image/png;base64,QUJD"
    content = [
        {"type": "image_url", "image_url": {"url": "7.b.png"}},
        {"type": "video", "video": "7.mp4"},
        {"type": "image", "image": url},
        {"type": "text", "text": "?"},
    ]
    item = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}],
        "references": {"answer": "y"},
    }
    conversation = only(tar({"7.a.png": b"A", "7.b.png": b"B", "7.mp4": b"V", "7.json": item}), format="messages")
    assert conversation.turns[0].content == (
        Image("000.tar: 7.b.png", b"B"),
        Video("000.tar: 7.mp4", b"V"),
        Image(url),
        Text("?"),
    )
    assert conversation.references == {"answer": "y"}


def test_text_only_items_stay_text(tar) -> None:
    item = {"conversations": [{"from": "human", "value": "<image> is a tag"}, {"from": "gpt", "value": "x"}]}
    assert only(tar({"7.json": item}), format="llava").turns[0].content == (Text("<image> is a tag"),)


def test_members_are_read_when_asked_for(tar, tmp_path) -> None:
    path = tar({"1.txt": b"a", "1.jpg": b"A", "2.txt": b"\xff", "2.jpg": b"B", "3.json": {"caption": 3}, "3.jpg": b"C"})
    conversations = make(path).build("train")
    assert conversations[0].turns[1].text == "a"
    with pytest.raises(DataError, match=r"000\.tar: 2\.txt: the text is not UTF-8"):
        conversations[1]
    with pytest.raises(DataError, match=r"000\.tar: 3: `caption` is not text"):
        conversations[2]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (b"{", r"000\.tar: 7\.json: this is no valid JSON"),
        (b"[1]", "no JSON object"),
        ({**LLAVA, "image": ["a.jpg", "b.jpg"]}, r"000\.tar: 7: .*1 marker\(s\)"),
        (
            {"conversations": [{"from": "human", "value": "<image><image>"}], "image": ["a.jpg", "b.jpg"]},
            r"000\.tar: 7: the item names a picture.*'a\.jpg'.*one of 7\.0\.jpg, 7\.1\.jpg",
        ),
        ({**LLAVA, "image": "7.2.jpg"}, r"not in the sample.*'7\.2\.jpg'"),
        ({**LLAVA, "video": "a.mp4"}, r"not in the sample.*'a\.mp4'.*a member with it"),
    ],
)
def test_errors_name_shard_and_sample(tar, item, message) -> None:
    path = tar({"7.json": item, "7.0.jpg": b"A", "7.1.jpg": b"B"})
    with pytest.raises(DataError, match=message):
        make(path, format="llava").build("train")[0]


def test_two_names_are_not_taken_for_the_only_picture(tar) -> None:
    item = {"image": ["a.jpg", "b.jpg"], "conversations": [{"from": "human", "value": "<image><image>"}]}
    with pytest.raises(DataError, match=r"not in the sample.*'a\.jpg'"):
        only(tar({"7.json": item, "7.jpg": b"A"}), format="llava")


def test_incomplete_samples_are_listed_or_left_out(tar) -> None:
    path = tar({"1.jpg": b"A", "1.txt": b"a", "2.txt": b"b", "3.jpg": b"C", "4.png": b"D", "4.json": {"text": "d"}})
    with pytest.raises(
        DataError,
        match=r"datasets\.w\.annotations\.train: 2 of 4 samples lack.*: 2 has txt; .*: 3 has jpg.*skip_incomplete",
    ):
        make(path).build("train")
    builder = make(path, skip_incomplete=True)
    conversations = builder.build("train")
    assert [c.id for c in conversations] == ["train/000/1", "train/000/4"]
    (notice,) = builder.notices
    assert notice.startswith("left out: datasets.w.annotations.train: 2 of 4 samples")
    with pytest.raises(DataError, match="4 of 4 samples"):
        make(path, skip_incomplete=True, json_ext="item", format="messages").build("train")


def test_other_extensions(tar) -> None:
    path = tar({"1.jpg": b"A", "1.caption": b"a", "1.txt": b"no"})
    assert only(path, text_ext="caption").turns[1].text == "a"


def test_the_configuration(tmp_path, monkeypatch) -> None:
    declare()
    assert registry.builders.config_class("webdataset") is WebDatasetConfig
    assert registry.builders.get("webdataset") is WebDataset
    monkeypatch.chdir(tmp_path)
    builder = make(["a/{0..1}.tar", "https://x/0.tar", "hf://datasets/a/b/0.tar"])
    assert builder.config.annotations["train"] == [
        str(tmp_path / "a/{0..1}.tar"),
        "https://x/0.tar",
        "hf://datasets/a/b/0.tar",
    ]
    assert list(builder.splits()) == ["train"]
    with pytest.raises(ConfigError, match=r"datasets\.w\.annotations\.train: there is no such shard"):
        builder.build("train")
    with pytest.raises(ConfigError, match="no split 'val'"):
        builder.build("val")
    with pytest.raises(ConfigError, match="image_root has no use here"):
        make("a.tar", image_root="pictures")
    with pytest.raises(ConfigError, match="output of a command can't be indexed"):
        make("pipe:cat a.tar").build("train")


def test_forked_workers_read_the_same(tar) -> None:
    members = {f"{n:03d}.{ext}": f"{ext} {n}".encode() for n in range(50) for ext in ("jpg", "txt")}
    conversations = make(tar(members)).build("train")
    expected = [conversations[n] for n in range(50)]
    with multiprocessing.get_context("fork").Pool(2, globals().update, ({"_conversations": conversations},)) as pool:
        assert pool.map(_at, range(50), chunksize=3) == expected


def _at(number: int) -> Conversation:
    return globals()["_conversations"][number]


def test_reading_20_000_samples_keeps_memory_flat(tar) -> None:
    psutil = pytest.importorskip("psutil")
    members = {
        f"{n:04d}.{ext}": os.urandom(1000) if ext == "jpg" else b"text" for n in range(500) for ext in ("jpg", "txt")
    }
    conversations = make(tar(members)).build("train")

    def read(passes: int) -> int:
        for _ in range(passes):
            for number in range(len(conversations)):
                conversations[number]
        return int(psutil.Process().memory_info().rss)

    before = read(2)
    assert read(38) < before + (1 << 20)  # keeping the pictures would take 19 MB
