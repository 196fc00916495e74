"""Save and load together with an engine: exact, refused where it does not fit, whole or not at all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lavis_ds import distributed
from lavis_ds.engines.fragments import Fragment, StoredFragments, restore
from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checkpoint, checkpoint_files, checkpoint_writer
from lavis_ds.runners.checkpoint_files import Keep, complete_ones, find
from lavis_ds.runners.checkpoint_writer import CheckpointWriter
from lavis_ds.runners.state import TrainState


class Engine:
    """One parameter with one moment."""

    def __init__(self, value: float = 1.0, **layout: Any) -> None:
        self.value, self.moment, self.clock = torch.tensor([value]), torch.tensor([10 * value]), {"step": 3.0}
        self.fresh: list[str] = []
        self.layout = {"engine": "torch", "precision": "bf16", "data_parallel_size": 1, **layout}

    def fragments(self) -> Iterator[Fragment]:
        yield Fragment("value", 0, self.value.shape, self.value, {"exp_avg": self.moment}, self.clock)

    def scaler_state(self) -> dict[str, float]:
        return {"cur_scale": 256.0}

    def restore(
        self,
        stored: StoredFragments,
        weights: Mapping[str, Tensor],
        scaler_state: dict[str, float],
        kept: Container[str] = (),
    ) -> list[str]:
        restore(self.fragments(), stored, weights)
        assert torch.equal(weights["value"], self.value)
        assert scaler_state == {"cur_scale": 256.0}
        return self.fresh

    def full_tensors(self, wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, Tensor]]:
        yield "value", self.value

    def describe(self) -> dict[str, Any]:
        return self.layout


def state(step: int = 0) -> TrainState:
    return TrainState(step=step, dataset_sizes={"a": 3}, global_batch_size=2)


def save(
    folder: Path, engine: Any, step: int, data_state: dict[str, Any] | None = None, *, behind: bool = False
) -> Path:
    writer = CheckpointWriter(folder, engine, in_background=behind)
    writer.begin(state(step), "run: {}\n", Keep(2), data_state or {})
    assert writer.is_pending
    path = writer.finish()
    assert not writer.is_pending
    return path


def test_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = save(tmp_path, Engine(5.0), 4)
    expected = torch.rand(3)
    torch.rand(10)
    engine, restored = Engine(0.0), state()
    checkpoint.load(path, engine, restored)  # type: ignore[arg-type]
    assert (float(engine.value), float(engine.moment), engine.clock["step"]) == (5.0, 50.0, 3.0)
    assert restored.step == 4
    assert torch.equal(torch.rand(3), expected), "random numbers go on where they were"
    assert float(load_file(path / "weights" / "model.safetensors")["value"]) == 5.0
    assert (path / "config.yaml").read_text() == "run: {}\n"


def test_a_rank_that_was_not_there_keeps_its_own_random_state(tmp_path: Path) -> None:
    path = save(tmp_path, Engine(), 4)
    (path / "rng" / "rank_00000.pt").rename(tmp_path / "elsewhere.pt")
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace('"rng/rank_00000.pt"', '"train_state.json"'))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    try:
        checkpoint.load(path, Engine(), state())  # type: ignore[arg-type]
    except CheckpointError:
        pytest.fail("the manifest was changed wrongly")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("saved", "current", "change"),
    [
        ({}, {"engine": "deepspeed"}, "engine torch -> deepspeed"),
        ({}, {"precision": "fp32"}, "precision bf16 -> fp32"),
        ({}, {"zero_stage": 3}, "zero_stage none -> 3"),
        ({"data_parallel_size": 4}, {"data_parallel_size": 2}, "data_parallel_size 4 -> 2"),
    ],
)
def test_another_layout_is_told(saved: Any, current: Any, change: str, tmp_path: Path) -> None:
    path = save(tmp_path, Engine(5.0, **saved), 4)
    engine = Engine(0.0, **current)
    (line,) = checkpoint.load(path, engine, state()).notices  # type: ignore[arg-type]
    assert line == f"step_00000004 was made with another layout and goes on in this one: {change}."
    assert float(engine.value) == 5.0
    assert checkpoint.load(path, Engine(**saved), state()).notices == []  # type: ignore[arg-type]


def test_parameters_that_did_not_train_are_named(tmp_path: Path) -> None:
    path, engine = save(tmp_path, Engine(), 4), Engine()
    engine.fresh = ["d", "c", "b", "a"]
    (line,) = checkpoint.load(path, engine, state()).notices  # type: ignore[arg-type]
    assert line == "4 parameters did not train before; their moments start anew: a, b, c, ...."


def test_a_stream_can_not_be_shared_out_anew(tmp_path: Path) -> None:
    path = save(tmp_path, Engine(), 4, {"lanes": {}})
    assert checkpoint.load(path, Engine(), state()).data_state == {"lanes": {}}  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"stream.*Given: 2 ranks.*Expected: 1.*data index"):
        checkpoint.load(path, Engine(data_parallel_size=2), state())  # type: ignore[arg-type]


def test_other_data_are_refused_before_the_engine_changes(tmp_path: Path) -> None:
    path = save(tmp_path, Engine(5.0), 4)
    engine = Engine(0.0)
    with pytest.raises(CheckpointError, match="training data"):
        checkpoint.load(path, engine, TrainState(dataset_sizes={"a": 4}, global_batch_size=2))  # type: ignore[arg-type]
    assert float(engine.value) == 0.0


class Killed(BaseException):
    """The process is gone."""


def kill(*_: Any, **__: Any) -> Any:
    raise Killed


@pytest.mark.parametrize(
    "place",
    [
        lambda m: m.setattr(Engine, "fragments", kill),
        lambda m: m.setattr(Engine, "full_tensors", kill),
        lambda m: m.setattr(torch, "save", kill),
        lambda m: m.setattr(distributed, "gather_objects", kill),
        lambda m: m.setattr(TrainState, "to_json", kill),
        lambda m: m.setattr(checkpoint_files, "finish", kill),
    ],
    ids=["engine", "weights", "random state", "checksums", "train state", "finish"],
)
def test_killed_while_saving_the_one_before_is_the_newest(
    place: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, Engine(1.0), 4)
    with monkeypatch.context() as patch:
        place(patch)
        with pytest.raises(Killed):
            save(tmp_path, Engine(2.0), 8)
    assert complete_ones(tmp_path) == [before]
    assert find(tmp_path) == (before, [])
    after = save(tmp_path, Engine(3.0), 8)  # what was left there does not stand in the way
    assert find(tmp_path) == (after, [])
    assert {p.name for p in (after / "optimizer").iterdir()} == {"rank_00000_00000.safetensors", "loss_scale.json"}


def test_what_is_written_in_the_background_is_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = checkpoint_writer.fragments.write
    monkeypatch.setattr(
        checkpoint_writer.fragments, "write", lambda *arguments: (may_write.wait(30), write(*arguments))[1]
    )
    engine = Engine(5.0)
    writer = CheckpointWriter(tmp_path, engine, in_background=True)  # type: ignore[arg-type]
    writer.begin(state(4), "", Keep(2), {})
    assert writer.is_busy()
    engine.value += 1  # training goes on
    engine.moment += 1
    torch.rand(3)
    assert complete_ones(tmp_path) == []
    may_write.set()
    path = writer.finish()
    assert not writer.is_busy()
    restored = Engine(0.0)
    checkpoint.load(path, restored, state())  # type: ignore[arg-type]
    assert (float(restored.value), float(restored.moment)) == (5.0, 50.0)


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_is_one_error_and_the_one_before_stays(
    behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, Engine(1.0), 4)
    gathered = []

    class Sharded(Engine):
        def full_tensors(self, wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, Tensor]]:
            for name in ("value", "other"):
                gathered.append(name)
                yield name, self.value

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.fragments, "write", full)
        with pytest.raises(CheckpointError, match=r"rank 0.*could not be written.*No space left.*make room"):
            save(tmp_path, Sharded(2.0), 8, behind=behind)
    assert gathered == ["value", "other"], "other ranks wait for this one in every gathering"
    assert find(tmp_path) == (before, [])
    assert find(tmp_path / save(tmp_path, Engine(3.0), 8).parent)[0] == tmp_path / "step_00000008"


def test_files_that_other_ranks_are_about_to_name_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors writes into a hidden file first, which may be gone a moment after it was seen."""
    write = checkpoint_writer.fragments.write

    def beside_another_rank(pieces: Any, folder: Path, rank: int) -> None:
        write(pieces, folder, rank)
        (folder / ".tmpYpiez9").symlink_to("nowhere")
        (folder / ".tmpAbcdef").write_text("half of rank 1's shard")

    monkeypatch.setattr(checkpoint_writer.fragments, "write", beside_another_rank)
    path = save(tmp_path, Engine(1.0), 4)
    files = checkpoint_files.verify(path)["files"]
    assert not [name for name in files if ".tmp" in name]
    assert "optimizer/rank_00000_00000.safetensors" in files


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    writer = CheckpointWriter(tmp_path, Engine(), in_background=False, size_bytes=2**31)  # type: ignore[arg-type]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**30))
    for refused in (
        lambda: writer.begin(state(4), "", Keep(2), {}),
        lambda: CheckpointWriter(tmp_path, Engine(), in_background=False, size_bytes=2**31),  # type: ignore[arg-type]
    ):
        with pytest.raises(CheckpointError, match=r"no room.*1\.0 GiB free.*about 2\.0 GiB.*keep_last"):
            refused()
    assert list(tmp_path.iterdir()) == []
    assert not writer.is_pending
