from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
import pytest

from lavis_ds.data.builders.webdataset import WebDataset
from lavis_ds.data.configs import WebDatasetConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.shards import parallel
from lavis_ds.data.shards.index import index_shards
from lavis_ds.data.shards.write import write_shards
from lavis_ds.errors import ConfigError, DataError


def talk(number: int, content: tuple, **options) -> Conversation:
    turns = (
        Turn("system", (Text("Be brief."),)),
        Turn("user", content),
        Turn("assistant", (Text(f"answer {number} ü"),), weight=0.5),
    )
    return Conversation(f"train/{number}", turns, **options)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    for number in range(30):
        PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"files/{number}.png")
    (tmp_path / "files/clip.mp4").write_bytes(b"not decoded here")
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "files/no_ending", "WEBP")
    return tmp_path / "files"


@pytest.fixture
def plain(files: Path) -> list[Conversation]:
    return [talk(n, (Image(str(files / f"{n}.png")), Text(f"question {n}"))) for n in range(30)]


def read_back(paths: str) -> Sequence[Conversation]:
    return WebDataset("w", WebDatasetConfig(annotations={"train": paths}, format="messages")).build("train")


def as_read(conversation: Conversation) -> list[tuple]:
    """What must be equal: roles, weights, texts, and the bytes of pictures and videos."""

    def content(part):
        if isinstance(part, Text):
            return part
        return type(part), part.data if part.data is not None else Path(part.path).read_bytes()

    return [(turn.role, turn.weight, [content(part) for part in turn.content]) for turn in conversation.turns]


def test_what_is_written_is_read_back(files, tmp_path) -> None:
    png = (files / "3.png").read_bytes()
    written = [
        talk(
            0,
            (Image(str(files / "0.png")), Text("<image> {x}"), Image(str(files / "1.png"))),
            references={"answer": "a", "n": [1]},
        ),
        talk(1, (Text("text only"),), references=None),
        talk(2, (Video(str(files / "clip.mp4")), Text("what happens?"))),
        talk(3, (Image("file.arrow: 3", png), Image(str(files / "no_ending")))),
        talk(4, (Text("two"), Text("texts"))),
    ]
    summary = write_shards(written, str(tmp_path / "out"), max_samples=2)
    assert [os.path.basename(path) for path in summary.shards] == ["000000.tar", "000001.tar", "000002.tar"]
    assert (summary.num_samples, summary.num_kept) == (5, 0)
    assert summary.num_bytes == sum(os.path.getsize(path) for path in summary.shards)
    read = read_back(str(tmp_path / "out/*.tar"))
    assert [as_read(conversation) for conversation in read] == [as_read(conversation) for conversation in written]
    assert [conversation.references for conversation in read] == [conversation.references for conversation in written]
    assert read[0].id == "train/000000/000000000"
    index = index_shards(str(tmp_path / "out/*.tar"))
    assert [list(index[n].spans) for n in range(4)] == [
        ["json", "0.png", "1.png"],
        ["json"],
        ["json", "mp4"],
        ["json", "0.png", "1.webp"],
    ]
    item = json.loads(index.read(index[0], ["json"])["json"])
    assert item["id"] == "train/0"
    assert item["messages"][1]["content"][0] == {"type": "image_url", "image_url": {"url": "000000000.0.png"}}
    assert item["messages"][2] == {"role": "assistant", "content": "answer 0 ü", "weight": 0.5}


def test_pixels_and_data_urls(tmp_path, files) -> None:
    pixels = PIL.Image.new("L", (3, 2), 7)
    jpeg = io.BytesIO()
    pixels.save(jpeg, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode()}"
    write_shards([talk(0, (Image("decoded", pixels), Image(url)))], str(tmp_path / "out"))
    first, second = read_back(str(tmp_path / "out/*.tar"))[0].images
    assert (first.path, second.path) == ("000000.tar: 000000000.0.png", "000000.tar: 000000000.1.jpg")
    assert second.data == jpeg.getvalue()
    with PIL.Image.open(io.BytesIO(first.data)) as image:
        assert image.mode == "L"
        assert image.tobytes() == pixels.tobytes()


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


def test_the_same_bytes_whatever_the_number_of_processes(plain, tmp_path) -> None:
    for folder, num_processes in (("one", 1), ("three", 3)):
        write_shards(plain, str(tmp_path / folder), max_samples=4, num_processes=num_processes)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "three")
    assert len(hashes(tmp_path / "one")) == 8
    assert len(list((tmp_path / "three").glob("*.tar.index.npz"))) == 8
    assert not list((tmp_path / "three").glob(".*"))


def test_long_units_are_divided(plain, tmp_path) -> None:
    summary = write_shards(plain, str(tmp_path / "out"), max_samples=10, max_bytes=8000)
    names = [os.path.basename(path) for path in summary.shards]
    assert names[:4] == ["000000.tar", "000000_01.tar", "000000_02.tar", "000000_03.tar"]  # 2,048 bytes a sample
    assert names == sorted(names)
    assert [c.turns[1].text for c in read_back(str(tmp_path / "out/*.tar"))] == [f"question {n}" for n in range(30)]
    index = index_shards(str(tmp_path / "out/*.tar"))
    assert max(index.shards, key=lambda shard: shard.size).size <= 10240  # tar rounds up to 10 KiB
    one_each = write_shards(plain[:3], str(tmp_path / "tiny"), max_bytes=1)
    assert len(one_each.shards) == 3


class Killing(Sequence):
    """Conversations whose reader is killed at one of them."""

    def __init__(self, conversations: Sequence[Conversation], at: int) -> None:
        self._conversations, self._at = conversations, at

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, number):
        if number == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._conversations[number]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("max_bytes", [1 << 30, 5000])
def test_a_killed_call_goes_on_where_it_was(plain, tmp_path, num_processes, max_bytes) -> None:
    options = {"max_samples": 4, "max_bytes": max_bytes}
    write_shards(plain, str(tmp_path / "whole"), **options)
    if (child := os.fork()) == 0:
        try:
            write_shards(Killing(plain, 17), str(tmp_path / "out"), num_processes=num_processes, **options)
        finally:
            os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (-signal.SIGKILL if num_processes == 1 else 7)
    there = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("[0-9]*.tar")}
    complete = {name: inode for name, inode in there.items() if int(name[:6]) < 4}
    assert len(there) < len(hashes(tmp_path / "whole"))
    with pytest.raises(ConfigError, match="holds shards already"):
        write_shards(plain, str(tmp_path / "out"), **options)
    summary = write_shards(plain, str(tmp_path / "out"), resume=True, num_processes=num_processes, **options)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    now = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.tar")}
    if num_processes == 1:  # else the other process had to stop amid its shard too
        assert summary.num_kept == len(complete) == (4 if max_bytes > 5000 else 8)
        assert complete.items() <= now.items()
    assert summary.num_kept > 0
    assert not list((tmp_path / "out").glob(".*"))


class Slow(Killing):
    """Conversations that take long from one of them on."""

    def __getitem__(self, number):
        if number >= self._at:
            time.sleep(60)
        return self._conversations[number]


def test_a_killed_call_leaves_no_process_that_holds_the_folder(plain, tmp_path) -> None:
    out = tmp_path / "out"
    if (child := os.fork()) == 0:
        try:
            write_shards(Slow(plain, 9), str(out), max_samples=4, num_processes=2)
        finally:
            os._exit(7)
    deadline = time.monotonic() + 30
    while not (out / "000001.tar").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(100):  # its processes are killed with it; a busy machine takes a while to see that
        try:
            written = write_shards(plain, str(out), max_samples=4, num_processes=2, resume=True)
        except ConfigError as error:
            if "another process is writing" not in str(error):
                raise
            time.sleep(0.1)
        else:
            break
    assert written.num_kept == 2


def test_damaged_shards_are_written_anew(plain, tmp_path) -> None:
    out = tmp_path / "out"
    write_shards(plain, str(out), max_samples=10)
    expected = hashes(out)
    os.truncate(out / "000001.tar", 5000)
    (out / "000002.tar").unlink()
    assert write_shards(plain, str(out), max_samples=10, resume=True).num_kept == 1
    assert hashes(out) == expected


def test_other_data_or_options_are_not_mixed(plain, tmp_path) -> None:
    out = str(tmp_path / "out")
    write_shards(plain, out, max_samples=10)
    with pytest.raises(ConfigError, match=r"other options.*'max_samples': 7.*'max_samples': 10"):
        write_shards(plain, out, max_samples=7, resume=True)
    with pytest.raises(ConfigError, match="other options"):
        write_shards(plain[:-1], out, max_samples=10, resume=True)
    with pytest.raises(ConfigError, match=r"000001\.tar: a shard there holds another sample.*sample 10"):
        write_shards([*plain[:10], *plain[11:], plain[10]], out, max_samples=10, resume=True)


def test_only_one_call_writes_to_a_folder(plain, tmp_path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is writing"):
        write_shards(plain, str(tmp_path / "out"))
    os.close(descriptor)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((Image("/nowhere/a.png"),), r"train/0 \(/nowhere/a\.png\): the file can't be read"),
        ((Video("/"),), "a folder of frames can't be put into a shard"),
        ((Image("blob", b"no picture"),), "the kind of the picture can't be told"),
        ((Image("data:image/png;base64,a"),), "the data URL can't be decoded"),
        ((Image("float", PIL.Image.new("F", (2, 2))),), "can't be written as PNG"),
    ],
)
def test_what_can_not_be_written_is_named(tmp_path, content, message) -> None:
    with pytest.raises(DataError, match=message):
        write_shards([talk(0, content)], str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("*.tar"))


def test_what_could_not_be_read_back_is_refused(tmp_path, files) -> None:
    shown = Conversation("a", (Turn("user", (Text("draw"),)), Turn("assistant", (Image(str(files / "0.png")),))))
    with pytest.raises(DataError, match=r"a: .*user messages only"):
        write_shards([shown], str(tmp_path / "out"))
    with pytest.raises(DataError, match="references can't be written as JSON"):
        write_shards([talk(0, (Text("x"),), references={"a": {1}})], str(tmp_path / "out2"))
    with pytest.raises(ConfigError, match="no samples"):
        write_shards([], str(tmp_path / "out3"))
    with pytest.raises(ConfigError, match="must be positive"):
        write_shards([shown], str(tmp_path / "out4"), max_samples=0)


def test_a_dead_process_is_named(plain, tmp_path) -> None:
    with pytest.raises(DataError, match=r"a process of 'writing shards' died"):
        write_shards(Killing(plain, 17), str(tmp_path / "out"), max_samples=4, num_processes=2)


def test_progress_is_shown(plain, tmp_path, capfd) -> None:
    write_shards(plain, str(tmp_path / "out"), max_samples=10, num_processes=2, progress=True)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert re.search(r"writing shards.*3/3", shown)
    assert re.search(r"indexing.*3/3", shown)


def test_results_keep_the_order_of_the_items() -> None:
    assert parallel.run_all(lambda n: n * n, range(20), num_processes=3, progress=False, title="x") == [
        n * n for n in range(20)
    ]
