"""Positions in time, height and width of text with pictures (multimodal rotary positions of Qwen-VL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lavis_ds.data.processors.views import Grid


def mrope_positions(length: int, pictures: Sequence[range], grids: Sequence[Grid], merge_size: int) -> Tensor:
    """(3, length) int64. Text counts on along all three; a picture has the place of its squares of patches.

    What follows a picture goes on after the largest place in it along height and width.

    Args:
        length: tokens of the sample.
        pictures: places of each picture's tokens, in order.
        grids: patches of each picture.
        merge_size: patches a side that one token stands for.

    Source: M-RoPE, https://arxiv.org/abs/2409.12191; `get_rope_index` of transformers' Qwen2-VL.
    """
    parts: list[Tensor] = []
    place, position = 0, 0
    for run, (frames, rows, columns) in zip(pictures, grids, strict=True):
        text = run.start - place
        parts.append(torch.arange(position, position + text).expand(3, -1))
        position += text
        sides = (frames, rows // merge_size, columns // merge_size)
        parts.append(torch.stack(torch.meshgrid(*map(torch.arange, sides), indexing="ij")).flatten(1) + position)
        place, position = run.stop, position + max(sides[1:])
    parts.append(torch.arange(position, position + length - place).expand(3, -1))
    return torch.cat(parts, dim=1)
