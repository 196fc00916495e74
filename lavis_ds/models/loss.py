"""The loss of next-token prediction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lavis_ds.batch import IGNORE_INDEX, Batch


class TargetLosses(NamedTuple):
    """What K targets give.

    Attributes:
        total: sum of the weighted losses, with gradient.
        each: weighted losses (K,), without.
        right: whether the best guess is the label (K,).
    """

    total: Tensor
    each: Tensor
    right: Tensor


def target_losses(logits_KV: Tensor, labels_K: Tensor, weights_K: Tensor | None) -> TargetLosses:
    """Losses from whole logits, each times its weight where there are weights."""
    losses_K = token_losses(logits_KV, labels_K)
    if weights_K is not None:
        losses_K = losses_K * weights_K
    right_K = logits_KV.detach().argmax(-1) == labels_K  # an ignored label is never an argmax
    return TargetLosses(losses_K.sum(), losses_K.detach(), right_K)


def token_losses(logits_KV: Tensor, labels_K: Tensor) -> Tensor:
    """Cross-entropy of each of K positions, (K,) float32, computed in float32.

    Positions labelled `IGNORE_INDEX` have a loss of exactly 0, and so have their gradients.
    """
    return F.cross_entropy(logits_KV.float(), labels_K, ignore_index=IGNORE_INDEX, reduction="none")


def sum_by_dataset(losses_K: Tensor, batch: Batch) -> Tensor:
    """Sums of the losses of each dataset of the run (D,), without gradient."""
    sums_D = losses_K.new_zeros(len(batch.by_dataset))
    numbers_K = torch.zeros_like(batch.target_index) if batch.target_dataset is None else batch.target_dataset
    return sums_D.index_add(0, numbers_K, losses_K.detach())
