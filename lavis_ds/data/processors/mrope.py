"""Positions in time, height and width of text with pictures and videos (multimodal rotary positions of Qwen-VL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lavis_ds.data.processors.views import Grid, Views, seconds_a_step

Box = tuple[Grid, float]
"""Patches that a run of places shows, and positions from one step along time to the next."""


def boxes(views: Views, tokens_per_second: float | None) -> list[Box]:
    """What each run of a picture's or video's places shows, as `PictureWriter` writes them."""
    assert views.grid is not None
    if views.times is None:
        return [(views.grid, 1.0)]
    steps, rows, columns = views.grid
    if tokens_per_second is None:
        return [((1, rows, columns), 1.0)] * steps
    # In float32, as the reference has it, for where a product lies just below a whole number it is rounded down.
    return [(views.grid, float(tokens_per_second * torch.tensor(seconds_a_step(views.times), dtype=torch.float32)))]


def mrope_positions(length: int, runs: Sequence[range], shown: Sequence[Box], merge_size: int) -> Tensor:
    """(3, length) int64. Text counts on along all three; a run of places has the places of its squares of patches.

    What follows a run goes on after the largest place in it along height and width.

    Args:
        length: tokens of the sample.
        runs: places of each picture's or video's tokens, in order.
        shown: what each of them shows.
        merge_size: patches a side that one token stands for.

    Source: M-RoPE, https://arxiv.org/abs/2409.12191; `get_rope_index` of transformers' Qwen2.5-VL and Qwen3-VL.
    """
    parts: list[Tensor] = []
    place, position = 0, 0
    for run, ((steps, rows, columns), interval) in zip(runs, shown, strict=True):
        text = run.start - place
        parts.append(torch.arange(position, position + text).expand(3, -1))
        position += text
        height, width = rows // merge_size, columns // merge_size
        axes = (_times(steps, interval), torch.arange(height), torch.arange(width))
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + position)
        place, position = run.stop, position + max(height, width)
    parts.append(torch.arange(position, position + length - place).expand(3, -1))
    return torch.cat(parts, dim=1)


def _times(steps: int, interval: float) -> Tensor:
    times = torch.arange(steps)
    return times if interval == 1 else (times * torch.tensor(interval, dtype=torch.float32)).long()
