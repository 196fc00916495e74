"""The loss of next-token prediction."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lavis_ds.batch import IGNORE_INDEX, Batch


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
