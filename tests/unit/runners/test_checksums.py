"""Checksums of files that are read in pieces are those of the whole, and no changed file is taken for the old one."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path

import pytest

from lavis_ds.runners import checksums
from lavis_ds.runners.checksums import Content, changed, contents

PIECE = 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of sizes around those of pieces and of the blocks that pieces are read in."""
    monkeypatch.setattr(checksums, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 300)
    drawn = random.Random(0)
    for size in (0, 1, 299, 300, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 7 * PIECE + 13):
        (tmp_path / str(size)).write_bytes(drawn.randbytes(size))
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_as_if_read_in_one_piece(folder: Path) -> None:
    expected = {}
    for name in names(folder):
        data = (folder / name).read_bytes()
        expected[name] = Content(len(data), zlib.crc32(data))
    assert contents(folder, iter(names(folder))) == expected
    assert changed(folder, expected) == []


def test_pieces_of_their_real_size(tmp_path: Path) -> None:
    """The first piece ends in the middle of what is written."""
    data = random.Random(0).randbytes(2**20)
    with (tmp_path / "large").open("wb") as file:
        file.seek(checksums._PIECE_BYTES - 2**19)
        file.write(data)
    whole = bytes(checksums._PIECE_BYTES - 2**19) + data
    assert contents(tmp_path, ["large"]) == {"large": Content(len(whole), zlib.crc32(whole))}


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 3 * PIECE + 500, 7 * PIECE + 12])
def test_one_wrong_bit_in_any_piece(folder: Path, place: int) -> None:
    before = contents(folder, names(folder))
    path = folder / str(7 * PIECE + 13)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert changed(folder, before) == [path.name]


def test_pieces_that_changed_places(folder: Path) -> None:
    path = folder / str(2 * PIECE)
    before = contents(folder, [path.name])
    data = path.read_bytes()
    path.write_bytes(data[PIECE:] + data[:PIECE])
    assert changed(folder, before) == [path.name]


@pytest.mark.parametrize("size", [0, PIECE, 2 * PIECE - 1, 2 * PIECE + 1, 3 * PIECE])
def test_another_length(folder: Path, size: int) -> None:
    path = folder / str(2 * PIECE)
    before = contents(folder, [path.name])
    path.write_bytes((path.read_bytes() + bytes(PIECE))[:size])
    assert changed(folder, before) == [path.name]


def test_what_can_not_be_read_has_changed_and_has_no_checksum(folder: Path) -> None:
    before = contents(folder, names(folder))
    (folder / "0").unlink()
    (folder / "299").unlink()
    (folder / "299").mkdir()
    shutil.copy(folder / "1", folder / "not listed")
    assert changed(folder, before) == ["0", "299"]
    with pytest.raises(FileNotFoundError):
        contents(folder, ["0"])
    with pytest.raises(IsADirectoryError):
        contents(folder, ["299"])
