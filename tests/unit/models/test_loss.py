from __future__ import annotations

import torch

from lavis_ds.batch import IGNORE_INDEX, Batch, DatasetCounts
from lavis_ds.models.loss import sum_by_dataset, token_losses


def test_is_computed_in_float32() -> None:
    logits = (torch.randn(5, 7) * 20).bfloat16()
    labels = torch.tensor([1, 6, IGNORE_INDEX, 0, 3])
    loss = token_losses(logits, labels)
    log_probs = logits.double().log_softmax(-1)
    expected = [-log_probs[k, label] if label >= 0 else 0.0 for k, label in enumerate(labels.tolist())]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-6)  # measured 3e-6


def test_sums_by_dataset_add_up() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch(
        input_ids=ids, labels=ids, position_ids=ids, attention_mask=ids == 0, images=None, image_index=ids[0],
        target_index=torch.arange(3), num_targets=3, target_weight=3.0, num_tokens=4, sample_ids=(), positions=(),
        by_dataset=tuple(DatasetCounts(name) for name in "abc"), target_dataset=torch.tensor([2, 0, 2]),
    )  # fmt: skip
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = sum_by_dataset(losses, batch)
    assert sums.tolist() == [2, 0, 5]
    assert not sums.requires_grad


def test_a_batch_without_targets_adds_exactly_nothing() -> None:
    logits = torch.randn(1, 7, requires_grad=True)
    loss = token_losses(logits, torch.tensor([IGNORE_INDEX])).sum()
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
