"""Batches that come through slots are those that were made, whoever is slow."""

from __future__ import annotations

import mmap
import pickle
import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lavis_ds.batch import Batch
from lavis_ds.data import hand_over
from lavis_ds.data.hand_over import Handed, Slots
from lavis_ds.data.worker import SupervisedBatches

NUM = 24


def batch(number: int) -> Batch:
    """Of every size, with two large tensors."""
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 99, (2, 9 + number), generator=rng)
    return Batch(
        input_ids=ids, labels=ids + 1, position_ids=ids, attention_mask=ids > 50,
        images=torch.randint(0, 255, (3 + number % 4, 3, 224, 224), dtype=torch.uint8, generator=rng),
        image_index=torch.arange(number % 3), target_index=torch.randint(0, 9, (40_000 + number,), generator=rng),
        num_targets=number, target_weight=0.5, num_tokens=7, sample_ids=(f"s{number}",), positions=(number,),
        by_dataset=(), references=({"answer": number},),
    )  # fmt: skip


def assert_same(found: Batch, expected: Batch) -> None:
    for field in fields(Batch):
        ours, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert torch.equal(ours, other), field.name
        else:
            assert ours == other, field.name


class Batches(Dataset[Any]):
    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, number: int) -> Batch:
        if self.slow and number % 2:
            time.sleep(0.02)
        return batch(number)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("slow", ["nobody", "a process", "the trainer"])
def test_batches_are_those_that_were_made(num_workers: int, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Handed] = []
    take = Handed.take
    monkeypatch.setattr(Handed, "take", lambda self: (taken.append(self), take(self))[1])
    watch: Any = None
    batches = SupervisedBatches(Batches(slow == "a process"), watch, num_workers, False, 60)
    found = []
    for one in batches:
        found.append(one)
        time.sleep(0.02 if slow == "the trainer" else 0)
    batches.close()
    for number, one in enumerate(found):  # only now: no slot was filled again too early
        assert_same(one, batch(number))
    assert len(taken) == (NUM if num_workers else 0)
    assert {handed.slot for handed in taken} <= {0, 1, 2}


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    """As a data-loading process sees them."""
    monkeypatch.setattr(hand_over, "get_worker_info", lambda: SimpleNamespace(id=0))
    return Slots(1, 2**21)


def test_a_message_holds_no_tensor(slots: Slots) -> None:
    handed = slots.put(batch(0))
    assert isinstance(handed, Handed)
    assert handed.rest.input_ids is None
    message = pickle.dumps(handed)
    assert len(message) < 10_000
    assert_same(pickle.loads(message).take(), batch(0))


def test_what_fits_no_slot_goes_the_common_way(slots: Slots) -> None:
    made = [batch(number) for number in range(5)]
    handed = [slots.put(one) for one in made]
    assert [isinstance(one, Handed) for one in handed] == [True] * 3 + [False] * 2  # three slots
    assert handed[3] is made[3]
    handed[1].take()
    assert isinstance(slots.put(made[4]), Handed)
    handed[0].take()
    large = replace(made[0], images=torch.zeros(20, 3, 224, 224, dtype=torch.uint8))
    assert slots.put(large) is large
    text = replace(made[0], images=None, target_index=torch.arange(3))
    assert slots.put(text) is text
    assert slots.put("an error") == "an error"


def test_without_memory_for_slots_there_are_none(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    made = batch(0)
    assert Slots(1).put(made) is made
