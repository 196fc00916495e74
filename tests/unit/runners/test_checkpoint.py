"""Save and load together with an engine: exact, refused where it does not fit, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checkpoint
from lavis_ds.runners.checkpoint_files import complete_ones, find
from lavis_ds.runners.state import TrainState


class Engine:
    """Saves one tensor."""

    def __init__(self, value: float = 1.0, **layout: Any) -> None:
        self.value = torch.tensor([value])
        self.layout = {"engine": "torch", "precision": "bf16", "data_parallel_size": 1, **layout}

    def save(self, folder: Path) -> None:
        torch.save(self.value, folder / "value.pt")

    def load(self, folder: Path) -> None:
        self.value = torch.load(folder / "value.pt", weights_only=True)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "value", self.value

    def describe(self) -> dict[str, Any]:
        return self.layout


def state(step: int = 0) -> TrainState:
    return TrainState(step=step, dataset_sizes={"a": 3}, global_batch_size=2)


def save(folder: Path, engine: Any, step: int) -> Path:
    return checkpoint.save(folder, engine, state(step), "run: {}\n", keep_last=2)


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
    ("saved", "current", "key"),
    [
        ({}, {"engine": "deepspeed"}, "engine"),
        ({}, {"precision": "fp32"}, "precision"),
        ({"engine": "deepspeed", "zero_stage": 2}, {"engine": "deepspeed", "zero_stage": 3}, "zero_stage"),
        ({"engine": "deepspeed"}, {"engine": "deepspeed", "data_parallel_size": 2}, "data_parallel_size"),
    ],
)
def test_another_layout_is_refused(saved: Any, current: Any, key: str, tmp_path: Path) -> None:
    path = save(tmp_path, Engine(5.0, **saved), 4)
    engine, restored = Engine(0.0, **current), state()
    with pytest.raises(CheckpointError, match=f"another layout.*Given: .*{key}=.*Expected: .*{key}="):
        checkpoint.load(path, engine, restored)  # type: ignore[arg-type]
    assert (float(engine.value), restored.step) == (0.0, 0)


def test_the_plain_engine_may_change_its_number_of_ranks(tmp_path: Path) -> None:
    engine = Engine(0.0, data_parallel_size=2)
    checkpoint.load(save(tmp_path, Engine(5.0), 4), engine, state())  # type: ignore[arg-type]
    assert float(engine.value) == 5.0


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
        lambda m: m.setattr(checkpoint.distributed, "barrier", kill),
        lambda m: m.setattr(TrainState, "save", kill),
        lambda m: m.setattr(checkpoint.checkpoint_files, "finish", kill),
    ],
    ids=["engine", "weights", "random state", "barrier", "train state", "finish"],
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
    assert {p.name for p in (after / "engine").iterdir()} == {"value.pt"}
