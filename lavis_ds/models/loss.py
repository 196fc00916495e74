"""The loss of next-token prediction."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lavis_ds.batch import IGNORE_INDEX


def sum_cross_entropy(logits_KV: Tensor, labels_K: Tensor) -> Tensor:
    """SUM of the cross-entropies of K positions, a float32 scalar computed in float32.

    Positions labelled `IGNORE_INDEX` add exactly 0, and so do their gradients. The training loop divides:
    only it knows the targets of the global batch.
    """
    return F.cross_entropy(logits_KV.float(), labels_K, ignore_index=IGNORE_INDEX, reduction="sum")
