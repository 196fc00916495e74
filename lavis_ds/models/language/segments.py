"""Which token may look at which, where a row holds several segments.

Shape suffixes: B rows, T tokens a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lavis_ds.batch import SEGMENT_STRIDE


def attention_mask(segment_ids_BT: Tensor, additive: torch.dtype | None = None) -> Tensor:
    """(B, 1, T, T), True where the query (third axis) may attend to the key (fourth).

    A token attends to itself, to earlier tokens of its own segment, and to its sample's prefix. Padding is a segment of
    its own, so that no row is without a key.

    Args:
        segment_ids_BT: see `lavis_ds.batch.Sample`.
        additive: give 0 and the smallest number of this type instead, for kernels that add the mask to the scores.
    """
    length = segment_ids_BT.shape[1]
    query_BT1, key_B1T = segment_ids_BT[:, :, None], segment_ids_BT[:, None, :]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=segment_ids_BT.device).tril()
    prefix_BT1 = query_BT1 // SEGMENT_STRIDE * SEGMENT_STRIDE
    mask_B1TT = (causal_TT & ((query_BT1 == key_B1T) | (prefix_BT1 == key_B1T)))[:, None]
    if additive is None:
        return mask_B1TT
    return torch.zeros_like(mask_B1TT, dtype=additive).masked_fill(~mask_B1TT, torch.finfo(additive).min)
