"""Which token may look at which, where a row holds several segments: as a mask, or as the ends of stretches of tokens.

Shape suffixes: B rows, T tokens a row, S stretches, M keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE

_PADDING_PIECE = 128
"""Padding is cut into stretches of at most so many tokens, since one long one would cost as much as a long sample."""


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


@dataclass(frozen=True)
class Boundaries:
    """The flat tokens (B * T) of a batch as S stretches that are causal each, for kernels of variable length.

    A stretch's keys are its own tokens and, before them, those it sees as a whole: its sample's prefix. Such a stretch
    has more keys than queries, and the last query sees the last key. S and the maxima are rounded up to powers of two
    (the stretches added are empty), so that compiled layers meet few different numbers.

    Attributes:
        ends_q: (S + 1,) int32, where the stretches' queries start and end.
        ends_k: (S + 1,) int32, the same of their keys.
        max_q: no stretch has more queries.
        max_k: no stretch has more keys.
        key_index: (M,) int64, the flat tokens whose keys follow each other; None where they are all tokens in order.
    """

    ends_q: Tensor
    ends_k: Tensor
    max_q: int
    max_k: int
    key_index: Tensor | None = None

    def options(self) -> dict[str, Any]:
        """As decoders of transformers pass them on to the attention function."""
        names = {"cu_seq_lens_q": self.ends_q, "cu_seq_lens_k": self.ends_k}
        return {**names, "max_length_q": self.max_q, "max_length_k": self.max_k, "key_index": self.key_index}


def boundaries(segment_ids_BT: Tensor, device: torch.device) -> Boundaries:
    """What `attention_mask` says, without a mask. Padding attends to nearby padding only; nobody looks there.

    Ids on the host are read without waiting for the device.
    """
    length = segment_ids_BT.shape[1]
    num_q: list[int] = []
    num_k: list[int] = []
    keys: list[tuple[int, int]] = []
    for number, row in enumerate(segment_ids_BT.cpu().numpy()):
        for start, end, seen in _stretches(row):
            num_q.append(end - start)
            num_k.append(end - start + sum(b - a for a, b in seen))
            keys += [(a + number * length, b + number * length) for a, b in [*seen, (start, end)]]
    index = None if num_q == num_k else torch.from_numpy(np.concatenate([np.arange(a, b) for a, b in keys]))
    return _on(device, num_q, num_k, index)


def rows_as_boundaries(shape: tuple[int, int], device: torch.device) -> Boundaries:
    """B rows of T tokens, each one causal sequence. Waits for nothing."""
    lengths = [shape[1]] * shape[0]
    return _on(device, lengths, lengths, None)


def _stretches(row: np.ndarray) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Neighbours of one segment: start, end, and the earlier stretches of the row that they see."""
    edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    found, earlier = [], dict[int, list[tuple[int, int]]]()
    for start, end in pairwise(edges):
        segment = int(row[start])
        if segment == PADDING_SEGMENT:
            pieces = range(start, end, _PADDING_PIECE)
            found += [(piece, min(piece + _PADDING_PIECE, end), list[tuple[int, int]]()) for piece in pieces]
            continue
        prefix = segment // SEGMENT_STRIDE * SEGMENT_STRIDE
        seen = [stretch for name in sorted({prefix, segment}) for stretch in earlier.get(name, [])]
        found.append((start, end, seen))
        earlier.setdefault(segment, []).append((start, end))
    return found


def _on(device: torch.device, num_q: list[int], num_k: list[int], index: Tensor | None) -> Boundaries:
    ends_q = _ends(num_q).to(device, non_blocking=True)
    ends_k = ends_q if index is None else _ends(num_k).to(device, non_blocking=True)
    index = index if index is None else index.to(device, non_blocking=True)
    return Boundaries(ends_q, ends_k, _round_up(max(num_q)), _round_up(max(num_k)), index)


def _ends(lengths: list[int]) -> Tensor:
    """(S + 1,): 0, the ends of the stretches, and the last end again for the empty ones."""
    empty = [0] * (_round_up(len(lengths)) - len(lengths))
    return torch.tensor([0, *lengths, *empty]).cumsum(0).to(torch.int32)


def _round_up(number: int) -> int:
    return 1 << (number - 1).bit_length()
