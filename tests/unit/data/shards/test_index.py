from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lavis_ds.data.shards import index as index_module
from lavis_ds.data.shards import table
from lavis_ds.data.shards.index import index_shards
from lavis_ds.errors import ConfigError, DataError


def samples(first: int, count: int) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for number in range(first, first + count):
        members |= {f"{number:04d}.jpg": os.urandom(700 + number), f"{number:04d}.txt": f"caption {number}".encode()}
    return members


def test_every_member_is_where_the_index_says(write_tar, tmp_path) -> None:
    parts = [samples(0, 3), samples(3, 1), samples(4, 5)]
    for number, members in enumerate(parts):
        write_tar(f"{number}.tar", members)
    index = index_shards(str(tmp_path / "{0..2}.tar"))
    assert len(index) == 9
    assert [index[i].shard for i in range(9)] == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    everything = parts[0] | parts[1] | parts[2]
    for number in range(9):
        sample = index[number]
        assert sample.key == f"{number:04d}"
        read = index.read(sample, sample.spans)
        assert read == {ext: everything[f"{number:04d}.{ext}"] for ext in ("jpg", "txt")}
    assert index.read(index[2], ["txt"]) == {"txt": b"caption 2"}
    assert isinstance(index.arrays["member_offset"], np.memmap)
    with pytest.raises(IndexError):
        index[9]


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path, style) -> None:
    name = "folder.with.dots/" + "lång" * 60
    with tarfile.open(tmp_path / "a.tar", "w", format=style) as archive:
        archive.addfile(tarfile.TarInfo("folder.with.dots"))
        for ext, data in (("0.JPG", b"first"), ("json", b"{}")):
            info = tarfile.TarInfo(f"{name}.{ext}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        archive.addfile(tarfile.TarInfo("__meta__/x.json"))
        folder = tarfile.TarInfo("d.txt")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    index = index_shards(str(tmp_path / "a.tar"))
    assert [(index[i].key, list(index[i].spans)) for i in range(len(index))] == [
        ("folder", ["with.dots"]),
        (name, ["0.JPG", "json"]),
    ]
    assert index.read(index[1], ["0.JPG", "json"]) == {"0.JPG": b"first", "json": b"{}"}


def test_which_samples_have_a_member(write_tar) -> None:
    path = write_tar("a.tar", {"0.jpg": b"", "0.txt": b"", "1.txt": b"", "2.png": b"", "2.jpg": b"", "3.json": b""})
    index = index_shards(path)
    assert index.has_member(lambda ext: ext in ("jpg", "png")).tolist() == [True, False, True, False]


def test_a_shard_is_read_once_and_again_when_it_changed(write_tar, tmp_path, monkeypatch) -> None:
    made: list[str] = []
    make = table.make_table

    def counted(source, stat):
        made.append(Path(stat.url).name)
        return make(source, stat)

    monkeypatch.setattr(index_module, "make_table", counted)
    write_tar("0.tar", samples(0, 2))
    write_tar("1.tar", samples(2, 2))
    pattern = str(tmp_path / "?.tar")
    index_shards(pattern)
    index_shards(pattern)
    assert made == ["0.tar", "1.tar"]
    write_tar("2.tar", samples(4, 1))
    assert len(index_shards(pattern)) == 5
    assert made == ["0.tar", "1.tar", "2.tar"]
    write_tar("1.tar", samples(2, 3))
    assert len(index_shards(pattern)) == 6
    assert made[3:] == ["1.tar"]


def test_the_index_beside_a_shard_travels_with_it(write_tar, tmp_path, monkeypatch) -> None:
    write_tar("a/0.tar", members := samples(0, 4))
    index_shards(str(tmp_path / "a/0.tar"), sidecars=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)  # other times of change
    made: list[str] = []
    monkeypatch.setattr(
        index_module, "make_table", lambda source, stat: made.append(stat.url) or table.make_table(source, stat)
    )
    index = index_shards(str(tmp_path / "b/0.tar"))
    assert made == []
    assert index.read(index[3], ["jpg"]) == {"jpg": members["0003.jpg"]}

    write_tar("b/0.tar", dict(reversed(members.items())))  # same length, other content
    assert index_shards(str(tmp_path / "b/0.tar"))[0].key == "0003"
    assert len(made) == 1
    (tmp_path / "a/0.tar.index.npz").write_bytes(b"PK\x03\x04 cut")
    os.utime(tmp_path / "a/0.tar", ns=(1, 1))
    assert len(index_shards(str(tmp_path / "a/0.tar"))) == 4
    assert len(made) == 2


def test_several_processes_give_the_same_index(write_tar, tmp_path, monkeypatch) -> None:
    for number in range(5):
        write_tar(f"{number}.tar", samples(10 * number, number + 1))
    one = index_shards(str(tmp_path / "?.tar"))
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "other"))
    three = index_shards(str(tmp_path / "?.tar"), num_processes=3)
    assert {name: array.tolist() for name, array in one.arrays.items()} == {
        name: array.tolist() for name, array in three.arrays.items()
    }


@pytest.mark.parametrize("length", [100, 512, 1300, 3000, 4096])
def test_a_tar_that_was_cut_is_an_error_wherever_it_ends(write_tar, length) -> None:
    path = write_tar("a.tar", {"0.jpg": bytes(1500), "0.txt": b"text", "1.txt": b"text"})
    with open(path, "r+b") as file:
        file.truncate(length)
    with pytest.raises(DataError, match=r"a\.tar: the shard is no readable tar"):
        index_shards(path)


def test_a_damaged_header_is_not_the_end(write_tar) -> None:
    path = write_tar("a.tar", {"0.txt": b"text", "1.txt": b"text"})
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(b"x" * 200)
    with pytest.raises(DataError, match=r"no readable tar file: .* at byte 1024"):
        index_shards(path)


def test_errors_name_shard_and_key(write_tar, tmp_path) -> None:
    path = write_tar("a.tar", {"0.txt": b"", "1.txt": b"", "0.jpg": b""})
    with pytest.raises(DataError, match=r"a\.tar: two samples have the same key.*Given: '0'"):
        index_shards(path)
    with pytest.raises(DataError, match=r"b\.tar: the shard holds no samples"):
        index_shards(write_tar("b.tar", {"README": b""}))
    (tmp_path / "c.tar").write_bytes(gzip.compress(Path(path).read_bytes()))
    with pytest.raises(DataError, match=r"c\.tar: the shard is no readable tar.*gunzip"):
        index_shards(str(tmp_path / "c.tar"))
    with tarfile.open(tmp_path / "d.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("0.txt"))
    with pytest.raises(DataError, match=r"d\.tar: 0\.txt: a member stands twice"):
        index_shards(str(tmp_path / "d.tar"))
    with pytest.raises(ConfigError, match="output of a command can't be indexed"):
        index_shards("pipe:cat x.tar")


def test_an_error_in_a_process_reaches_the_caller_whole(write_tar, tmp_path) -> None:
    write_tar("0.tar", {"0.txt": b""})
    write_tar("1.tar", {"README": b""})
    with pytest.raises(DataError, match="holds no samples") as caught:
        index_shards(str(tmp_path / "?.tar"), num_processes=2)
    assert caught.value.where == str(tmp_path / "1.tar")


def test_forks_read_at_the_same_time_through_one_handle(write_tar) -> None:
    members = {f"{number:03d}.bin": bytes([number]) * 5000 for number in range(100)}
    index = index_shards(write_tar("a.tar", members))
    index.read(index[0], ["bin"])  # opens the file before the fork
    with multiprocessing.get_context("fork").Pool(
        4, initializer=globals().update, initargs=({"_index": index},)
    ) as pool:
        assert all(pool.map(_is_right, list(range(100)) * 5, chunksize=7))


def _is_right(number: int) -> bool:
    index = globals()["_index"]
    return index.read(index[number], ["bin"]) == {"bin": bytes([number]) * 5000}


def test_a_shard_cut_after_indexing_is_named(write_tar) -> None:
    path = write_tar("a.tar", {"0.bin": bytes(5000)})
    index = index_shards(path)
    index.read(index[0], ["bin"])
    os.truncate(path, 3000)
    with pytest.raises(DataError, match=r"a\.tar: the shard ends too early.*2488 of 5000 bytes"):
        index.read(index[0], ["bin"])


def test_a_shard_replaced_after_indexing_is_not_read_as_the_old_one(write_tar) -> None:
    path = write_tar("a.tar", {"0.bin": b"old"})
    index = index_shards(path)
    os.unlink(path)
    write_tar("a.tar", {"0.bin": b"new"})
    with pytest.raises(DataError, match=r"a\.tar: the shard changed since it was indexed"):
        index.read(index[0], ["bin"])
    assert index_shards(path).read(index[0], ["bin"]) == {"bin": b"new"}


def test_reading_many_samples_keeps_memory_flat(write_tar) -> None:
    psutil = pytest.importorskip("psutil")
    members = {f"{number:05d}.{ext}": bytes(500) for number in range(2000) for ext in ("jpg", "txt")}
    index = index_shards(write_tar("a.tar", members))

    def read_all() -> int:
        for number in range(len(index)):
            index.read(index[number], ("jpg", "txt"))
        return int(psutil.Process().memory_info().rss)

    read_all()
    before = read_all()
    for _ in range(10):
        after = read_all()
    assert after < before + (1 << 20)  # over 20,000 samples; keeping them would take 20 MB


def test_the_index_is_compact(write_tar) -> None:
    members = {f"{number:09d}.{ext}": b"" for number in range(500) for ext in ("jpg", "txt", "json")}
    index = index_shards(write_tar("a.tar", members))
    assert sum(array.nbytes for array in index.arrays.values()) / 500 < 90  # measured: 79 bytes a sample of 3 members
