"""On a GPU: batches from data-loading processes arrive in pinned memory, every tensor of them, and whole."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from lavis_ds.data.hand_over import Handed
from lavis_ds.data.worker import SupervisedBatches
from tests.unit.data.test_hand_over import NUM, Batches, assert_same, batch

pytestmark = pytest.mark.gpu


def test_all_tensors_are_pinned_from_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Handed] = []
    pin = Handed.pin_memory
    monkeypatch.setattr(Handed, "pin_memory", lambda self: (pinned.append(self), pin(self))[1])
    watch: Any = None
    batches = SupervisedBatches(Batches(), watch, 2, True, 60)
    found = list(batches)
    batches.close()
    for number, one in enumerate(found):
        assert_same(one, batch(number))
        tensors = [value for f in fields(one) if isinstance(value := getattr(one, f.name), torch.Tensor)]
        assert all(tensor.is_pinned() for tensor in tensors if tensor.numel())
    assert len(pinned) == len(found) == NUM
