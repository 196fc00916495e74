"""Counters: how they advance, and what a resumed run refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lavis_ds.errors import CheckpointError
from lavis_ds.runners.state import TrainState


def state() -> TrainState:
    return TrainState(dataset_sizes={"a": 6, "b": 4}, samples_an_epoch=10, global_batch_size=4)


def test_advance_counts_one_step() -> None:
    counted = state()
    counted.advance(samples=4, tokens=50, targets=20)
    counted.advance(samples=3, tokens=30, targets=10)
    assert (counted.step, counted.samples_seen, counted.tokens_seen, counted.targets_seen) == (2, 7, 80, 30)


def test_epoch_is_a_fraction() -> None:
    counted = state()
    assert counted.epoch == 0.0
    counted.advance(samples=15, tokens=1, targets=1)
    assert counted.epoch == 1.5
    assert TrainState().epoch == 0.0


def test_saved_and_restored(tmp_path: Path) -> None:
    saved = state()
    saved.advance(samples=4, tokens=50, targets=20)
    saved.steps_skipped = 1
    (tmp_path / "s.json").write_text(saved.to_json())
    restored = state()
    restored.restore(tmp_path / "s.json")
    assert restored == saved
    assert TrainState.step_of(tmp_path / "s.json") == 1


@pytest.mark.parametrize("sizes", [{"a": 6, "b": 5}, {"a": 10}, {"b": 4, "c": 6}])
def test_other_data_are_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(state().to_json())
    other = TrainState(step=0, dataset_sizes=sizes, global_batch_size=4)
    with pytest.raises(CheckpointError, match="training data is not what this checkpoint") as caught:
        other.restore(tmp_path / "s.json")
    assert str(sizes) in str(caught.value)
    assert other.step == 0


def test_another_global_batch_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(state().to_json())
    other = TrainState(dataset_sizes=state().dataset_sizes, global_batch_size=8)
    with pytest.raises(CheckpointError, match=r"global batch size.*Given: 8\. Expected: 4\."):
        other.restore(tmp_path / "s.json")


@pytest.mark.parametrize("content", ["", "[1]", '{"step": 1, "unknown": 2}', None])
def test_damaged_state(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match="training state can't be read"):
        state().restore(path)


def test_the_file_is_json_of_every_counter(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(state().to_json())
    assert set(json.loads((tmp_path / "s.json").read_text())) == set(TrainState.__dataclass_fields__)


def test_another_seed_or_order_of_datasets_is_refused(tmp_path: Path) -> None:
    """Both would silently change which samples come next."""
    saved = TrainState(dataset_sizes={"a": 6, "b": 4}, global_batch_size=4, seed=1)
    (tmp_path / "state.json").write_text(saved.to_json())
    for other in (
        TrainState(dataset_sizes={"a": 6, "b": 4}, global_batch_size=4, seed=2),
        TrainState(dataset_sizes={"b": 4, "a": 6}, global_batch_size=4, seed=1),
    ):
        with pytest.raises(CheckpointError, match="order of samples could not go on"):
            other.restore(tmp_path / "state.json")
