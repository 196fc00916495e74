"""A batch moves and is pinned as a whole."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from lavis_ds.batch import Batch, DatasetCounts


@pytest.fixture
def batch() -> Batch:
    ids = torch.arange(12).view(3, 4)
    return Batch(
        input_ids=ids,
        labels=ids,
        position_ids=ids,
        attention_mask=ids > 1,
        images=torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
        image_index=torch.tensor([], dtype=torch.int64),
        target_index=torch.tensor([2]),
        num_targets=1,
        num_tokens=12,
        target_weight=1.0,
        sample_ids=("a", "b", "c"),
        positions=(0, 1, 2),
        by_dataset=(DatasetCounts("d", 3, 12, 1.0),),
        references=({"answer": "x"}, None, None),
    )


def test_shape_is_rows_and_tokens(batch: Batch) -> None:
    assert batch.shape == (3, 4)


def test_every_tensor_moves_and_the_rest_stays(batch: Batch) -> None:
    moved = batch.to(torch.device("meta"))
    for field in fields(Batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert after.device.type == "meta", field.name
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
        else:
            assert after == before, field.name
    assert batch.input_ids.device.type == "cpu"


def test_pinning_maps_every_tensor(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batch.pin_memory()
    tensors = [getattr(batch, f.name) for f in fields(Batch)]
    assert set(pinned) == {id(t) for t in tensors if isinstance(t, torch.Tensor)}


def test_a_batch_is_frozen(batch: Batch) -> None:
    with pytest.raises(AttributeError):
        batch.num_targets = 0  # type: ignore[misc]
