"""A checkpoint is there as a whole or not at all, whenever the run dies; damaged ones are passed over and named."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checkpoint_files
from lavis_ds.runners.checkpoint_files import (
    Keep,
    begin,
    changed,
    complete_ones,
    find,
    finish,
    step_folder,
    verify,
    written,
)
from lavis_ds.runners.checksums import contents

Make = Callable[..., Path]


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_ones(folder)]


def test_finished_checkpoint_is_complete_and_latest(tmp_path: Path, make_checkpoint: Make) -> None:
    path = make_checkpoint(tmp_path, 4)
    assert path == tmp_path / "step_00000004"
    assert (tmp_path / "latest").read_text() == "step_00000004\n"
    manifest = verify(path)
    assert manifest["files"] == {
        "optimizer/shard.pt": {"bytes": 100, "crc32": zlib.crc32(b"x" * 100)},
        "train_state.json": {"bytes": 2, "crc32": zlib.crc32(b"{}")},
    }
    assert manifest["layout"] == {"engine": "torch"}
    assert find(tmp_path) == (path, [])


def test_begun_checkpoint_is_none_yet(tmp_path: Path, make_checkpoint: Make) -> None:
    old = make_checkpoint(tmp_path, 4)
    partial = begin(step_folder(tmp_path, 8))
    (partial / "train_state.json").write_text("{}")
    assert names(tmp_path) == ["step_00000004"]
    assert find(tmp_path) == (old, [])
    assert (tmp_path / "latest").read_text() == "step_00000004\n"


def test_begin_clears_what_a_dead_run_left(tmp_path: Path) -> None:
    (begin(step_folder(tmp_path, 4)) / "optimizer" / "old_shard.pt").write_text("old")
    partial = begin(step_folder(tmp_path, 4))
    assert sorted(p.name for p in partial.rglob("*")) == ["data", "optimizer", "rng"]


def test_the_last_ones_are_kept(tmp_path: Path, make_checkpoint: Make) -> None:
    for step in (2, 4, 6, 8, 10):
        make_checkpoint(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step_00000008", "step_00000010"]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == names(tmp_path)


def test_unfinished_ones_do_not_count_among_the_last(tmp_path: Path, make_checkpoint: Make) -> None:
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step_00000004" / "COMPLETE").unlink()
    make_checkpoint(tmp_path, 6, keep_last=2)
    assert names(tmp_path) == ["step_00000002", "step_00000006"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_one_just_written_stays_beside_a_damaged_later_one(
    keep_last: int, tmp_path: Path, make_checkpoint: Make
) -> None:
    """Resumed from step 4 because step 8 was damaged, a run must not lose the step 6 it then writes."""
    for step in (4, 8):
        make_checkpoint(tmp_path, step, keep_last=9)
    make_checkpoint(tmp_path, 6, keep_last=keep_last)
    assert names(tmp_path) == ["step_00000006"] + (["step_00000008"] if keep_last > 1 else [])


def test_a_step_is_saved_again(tmp_path: Path, make_checkpoint: Make) -> None:
    path = make_checkpoint(tmp_path, 4)
    (path / "marker").touch()
    make_checkpoint(tmp_path, 4)
    assert not (path / "marker").exists()
    verify(path)


def unfinished(path: Path) -> None:
    (path / "COMPLETE").unlink()


def truncated(path: Path) -> None:
    (path / "optimizer" / "shard.pt").write_bytes(b"x" * 99)


def without_a_file(path: Path) -> None:
    (path / "optimizer" / "shard.pt").unlink()


def without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def with_a_half_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "fil')


def with_another_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (unfinished, r"step_00000008: this checkpoint was not finished"),
        (truncated, r"step_00000008/optimizer/shard\.pt: a file has changed.*Given: 99 bytes\. Expected: 100 bytes"),
        (without_a_file, r"shard\.pt: a file is missing"),
        (without_manifest, r"step_00000008: the manifest can't be read"),
        (with_a_half_manifest, r"step_00000008: the manifest can't be read"),
        (with_another_manifest, r"step_00000008: the manifest can't be read"),
    ],
)
def test_damage_is_found_and_the_one_before_is_taken(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, make_checkpoint: Make
) -> None:
    old, new = make_checkpoint(tmp_path, 4), make_checkpoint(tmp_path, 8)
    damage(new)
    with pytest.raises(CheckpointError, match=reason) as caught:
        verify(new)
    assert find(tmp_path) == (old, [str(caught.value)])


def test_the_message_names_the_complete_ones_beside_it(tmp_path: Path, make_checkpoint: Make) -> None:
    make_checkpoint(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"no such checkpoint folder\. Complete ones beside it: step_00000004\."):
        verify(tmp_path / "step_00000005")
    with pytest.raises(CheckpointError, match="no complete checkpoint beside it"):
        verify(tmp_path / "step_00000004" / "optimizer")


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find(tmp_path / "absent") == (None, [])
    assert complete_ones(tmp_path / "absent") == []


class Killed(BaseException):
    """The process is gone."""


def dies_at(operation: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that changes the disk is counted; the one of this number is not done, or half done, and raises."""
    log: list[str] = []

    def wrap(owner: Any, name: str, half: Callable[..., None] | None = None) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            if len(log) == operation:
                if half is not None:
                    half(*args)
                raise Killed(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("touch", "rename", "unlink"):
        wrap(Path, name)
    wrap(Path, "write_text", half=lambda path, text: path.write_bytes(text.encode()[: len(text) // 2]))
    wrap(shutil, "rmtree", half=lambda path: (path / "manifest.json").unlink())
    return log


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_any_moment_there_is_a_whole_checkpoint(
    again: bool, tmp_path: Path, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`again`: the step that is saved was saved before."""
    for operation in range(1, 30):
        folder = tmp_path / str(operation)
        for step in (2, 4, 6, *([8] if again else [])):
            make_checkpoint(folder, step)
        partial = begin(step_folder(folder, 8))
        (partial / "train_state.json").write_text('{"step": 8}')
        with monkeypatch.context() as patch:
            log = dies_at(operation, patch)
            try:
                finish(partial, step_folder(folder, 8), {}, {}, Keep(2), contents(partial, written(partial)))
            except Killed:
                pass
            else:
                assert len(log) >= 8  # both writings, the mark, two renamings, and two removals of two operations
                break
        found, _ = find(folder)
        assert found in (step_folder(folder, 6), step_folder(folder, 8)), log
        assert all(verify(path) for path in complete_ones(folder)), log
        if found == step_folder(folder, 8) and not again:
            assert json.loads((found / "train_state.json").read_text()) == {"step": 8}
        latest = (folder / checkpoint_files.LATEST).read_text().strip()
        assert latest in ("step_00000006", "step_00000008"), log
    else:
        pytest.fail("never came to an end")
    assert names(folder) == ["step_00000006", "step_00000008"]


def test_another_format_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 4)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(CheckpointError, match=r"another version.*format 1.*model\.pretrained"):
        verify(path)


def test_every_nth_and_the_best_are_kept(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in range(1, 9):
        make_checkpoint(tmp_path, step, keep_last=2, every=3, best_step=4)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (3, 4, 6, 7, 8)]
    make_checkpoint(tmp_path, 9, keep_last=2, every=3, best_step=9)  # the best is another one now
    assert names(tmp_path) == [f"step_{step:08d}" for step in (3, 6, 8, 9)]


def test_a_flipped_bit_is_found_by_reading(make_checkpoint: Make, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 4)
    manifest = verify(path)
    assert changed(path, manifest, manifest["files"]) == []
    shard = path / "optimizer" / "shard.pt"
    shard.write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    assert verify(path) == manifest, "sizes alone do not tell"
    assert changed(path, manifest, manifest["files"]) == ["optimizer/shard.pt"]


def test_older_ones_are_found(make_checkpoint: Make, tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (2, 4, 6)]
    assert find(tmp_path, before=paths[2]) == (paths[1], [])
    assert find(tmp_path, before=paths[0]) == (None, [])
