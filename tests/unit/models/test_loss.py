from __future__ import annotations

import torch

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.models.loss import sum_cross_entropy


def test_is_the_sum_in_float32() -> None:
    logits = (torch.randn(5, 7) * 20).bfloat16()
    labels = torch.tensor([1, 6, IGNORE_INDEX, 0, 3])
    loss = sum_cross_entropy(logits, labels)
    log_probs = logits.double().log_softmax(-1)
    expected = -sum(log_probs[k, label] for k, label in enumerate(labels.tolist()) if label != IGNORE_INDEX)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), torch.as_tensor(expected), atol=1e-4, rtol=1e-6)  # measured 3e-6


def test_a_batch_without_targets_adds_exactly_nothing() -> None:
    logits = torch.randn(1, 7, requires_grad=True)
    loss = sum_cross_entropy(logits, torch.tensor([IGNORE_INDEX]))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
