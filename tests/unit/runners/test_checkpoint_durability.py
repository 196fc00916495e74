"""Power may fail at any moment: the checkpoint that is newest then is on the disk, not only in the system's memory."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checkpoint_files, checksums
from lavis_ds.runners.checkpoint_files import Keep, complete_ones
from lavis_ds.runners.checkpoint_writer import CheckpointWriter
from tests.unit.runners.test_checkpoint import Engine, state


class Disk:
    """What has reached the disk: files with the size they had, and folders with the names that were in them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, int] = {}
        self.folders: dict[int, set[str]] = {}
        patch.setattr(os, "fsync", self._sync)

    def _sync(self, handle: int) -> None:
        path, found = Path(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle)
        if path.is_dir():
            self.folders[found.st_ino] = {child.name for child in path.iterdir()}
        else:
            self.files[found.st_ino] = found.st_size

    def has(self, path: Path) -> bool:
        """Whether all of it is there, under this name."""
        found = path.stat()
        is_named = path.name in self.folders.get(path.parent.stat().st_ino, ())
        return is_named and (path.is_dir() or self.files.get(found.st_ino) == found.st_size)


def save(folder: Path, step: int, keep: Keep, *, behind: bool = False) -> None:
    writer = CheckpointWriter(folder, Engine(float(step)), in_background=behind)  # type: ignore[arg-type]
    writer.begin(state(step), "run: {}\n", keep, {"lanes": {}})
    writer.finish()


@pytest.mark.parametrize("behind", [False, True])
def test_a_checkpoint_is_on_the_disk_before_another_is_removed(
    behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, Keep(1))
    disk, remove, removed = Disk(monkeypatch), checkpoint_files._remove, []

    def checked(path: Path) -> None:
        new = tmp_path / "step_00000004"
        paths = [new, *(found for found in new.rglob("*") if found.is_file() or any(found.iterdir()))]
        assert {"COMPLETE", "manifest.json", "model.safetensors", "rank_00000.pt"} <= {found.name for found in paths}
        assert [found for found in paths if not disk.has(found)] == []
        removed.append(path.name)
        remove(path)

    monkeypatch.setattr(checkpoint_files, "_remove", checked)
    save(tmp_path, 4, Keep(1), behind=behind)
    assert removed == ["step_00000002"]


def test_the_mark_is_made_when_everything_else_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, touch, marked = Disk(monkeypatch), Path.touch, []

    def checked(path: Path) -> None:
        marked.append(path.relative_to(tmp_path).as_posix())
        files = [found for found in path.parent.rglob("*") if found.is_file()]
        assert len(files) == 8
        assert [found for found in files if not disk.has(found)] == []
        touch(path)

    monkeypatch.setattr(Path, "touch", checked)
    save(tmp_path, 4, Keep(1))
    assert marked == ["step_00000004/COMPLETE"], "under its final name"


def test_a_disk_that_only_finds_out_when_it_must_write_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems take what is written, and say at the end that there was no room for it."""
    save(tmp_path, 2, Keep(1))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 4, Keep(1))
    assert [path.name for path in complete_ones(tmp_path)] == ["step_00000002"]
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("name", ["rank_00000_00000.safetensors", "model.safetensors"])
def test_an_error_that_the_disk_tells_once_is_not_missed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux says no more of it at the next flush of the same file."""
    save(tmp_path, 2, Keep(1))
    told: list[str] = []

    def bad_sector(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == name and not told:
            told.append(path.name)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", bad_sector)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 4, Keep(1))
    assert told == [name]
    assert [path.name for path in complete_ones(tmp_path)] == ["step_00000002"]


def test_file_systems_that_can_not_flush_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files_only(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", files_only)
    save(tmp_path, 4, Keep(1))
    assert [path.name for path in complete_ones(tmp_path)] == ["step_00000004"]


def test_what_dead_runs_left_makes_room(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half written and half removed ones go, before the disk is asked for its room; what might be whole stays."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step_00000002" / "COMPLETE").unlink()
    (tmp_path / "step_00000006" / "COMPLETE").unlink()
    checkpoint_files.begin(tmp_path / "step_00000008")
    usage, left = shutil.disk_usage(tmp_path), []

    def asked(_: Path) -> Any:
        left.extend(sorted(path.name for path in tmp_path.iterdir()))
        return usage

    monkeypatch.setattr(shutil, "disk_usage", asked)
    CheckpointWriter(tmp_path, Engine(), in_background=False)  # type: ignore[arg-type]
    assert left == ["latest", "step_00000004", "step_00000006"]


def test_a_background_thread_that_fails_for_any_reason_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all one with the checksums of the checkpoint before."""
    writer = CheckpointWriter(tmp_path, Engine(), in_background=True)  # type: ignore[arg-type]
    writer.begin(state(2), "", Keep(1), {})
    writer.finish()

    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(checksums, "contents", broken)
    writer.begin(state(4), "", Keep(1), {})
    with pytest.raises(CheckpointError, match="rank 0: the checkpoint could not be written: MemoryError"):
        writer.finish()
    assert [path.name for path in complete_ones(tmp_path)] == ["step_00000002"]


def test_a_file_that_can_not_be_read_back_is_damaged(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, 4)
    manifest, read = checkpoint_files.verify(path), checksums._piece

    def bad_sector(file: Path, start: int) -> Any:
        if file.name == "shard.pt":
            raise OSError(errno.EIO, "Input/output error")
        return read(file, start)

    monkeypatch.setattr(checksums, "_piece", bad_sector)
    assert checkpoint_files.changed(path, manifest, manifest["files"]) == ["optimizer/shard.pt"]
