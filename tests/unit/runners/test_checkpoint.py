"""Save and load together with an engine: exact, refused where it does not fit, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checkpoint
from lavis_ds.runners.checkpoint_files import Keep, complete_ones, find
from lavis_ds.runners.state import TrainState


class Engine:
    """Saves one tensor."""

    def __init__(self, value: float = 1.0, **layout: Any) -> None:
        self.value = torch.tensor([value])
        self.fresh: list[str] = []
        self.layout = {"engine": "torch", "precision": "bf16", "data_parallel_size": 1, **layout}

    def save(self, folder: Path) -> None:
        torch.save(self.value, folder / "value.pt")

    def load(self, folder: Path, weights: Mapping[str, Tensor]) -> list[str]:
        self.value = torch.load(folder / "value.pt", weights_only=True)
        assert torch.equal(weights["value"], self.value)
        return self.fresh

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "value", self.value

    def describe(self) -> dict[str, Any]:
        return self.layout


def state(step: int = 0) -> TrainState:
    return TrainState(step=step, dataset_sizes={"a": 3}, global_batch_size=2)


def save(folder: Path, engine: Any, step: int) -> Path:
    return checkpoint.save(folder, engine, state(step), "run: {}\n", Keep(2))


def test_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = save(tmp_path, Engine(5.0), 4)
    expected = torch.rand(3)
    torch.rand(10)
    engine, restored = Engine(0.0), state()
    checkpoint.load(path, engine, restored)  # type: ignore[arg-type]
    assert float(engine.value) == 5.0
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
    path = checkpoint.save(tmp_path, Engine(), state(4), "", Keep(2), {"lanes": {}})  # type: ignore[arg-type]
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
        lambda m: m.setattr(Engine, "save", kill),
        lambda m: m.setattr(Engine, "full_tensors", kill),
        lambda m: m.setattr(torch, "save", kill),
        lambda m: m.setattr(checkpoint.distributed, "gather_objects", kill),
        lambda m: m.setattr(TrainState, "save", kill),
        lambda m: m.setattr(checkpoint.checkpoint_files, "finish", kill),
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
    assert {p.name for p in (after / "optimizer").iterdir()} == {"value.pt"}
