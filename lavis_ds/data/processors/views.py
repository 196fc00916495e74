"""What a picture or a video becomes: views of one size, or patches at its own size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int, int]
"""Patches along time, height and width."""

FRAMES_A_STEP = 2
"""Frames that a patch is deep, so that a step along time spans them; a picture is two equal frames."""


@dataclass(frozen=True)
class Views:
    """One picture or video, processed.

    Attributes:
        pixels: (V, 3, H, W) uint8; at native resolution (V, D), a patch a row.
        grid: patches along time, height and width, V in all; None at a fixed size.
        times: of a video, the seconds at which each of its frames is taken; None of a picture.
    """

    pixels: Tensor
    grid: Grid | None = None
    times: tuple[float, ...] | None = None

    def __len__(self) -> int:
        """V."""
        return int(self.pixels.shape[0])


def as_views(pixels: Tensor | Views) -> Views:
    """A (3, H, W) or (V, 3, H, W) tensor as views."""
    if isinstance(pixels, Views):
        return pixels
    return Views(pixels if pixels.dim() == 4 else pixels[None])


def step_times(times: Sequence[float]) -> list[float]:
    """Seconds of each step along time, halfway between its frames; an odd last frame stands for two."""
    firsts = times[::FRAMES_A_STEP]
    lasts = [*times[FRAMES_A_STEP - 1 :: FRAMES_A_STEP], times[-1]]
    return [(first + last) / 2 for first, last in zip(firsts, lasts, strict=False)]


def seconds_a_step(times: Sequence[float]) -> float:
    """Seconds that a step along time spans; 0 where there is one frame, and so one step."""
    return FRAMES_A_STEP * (times[-1] - times[0]) / max(1, len(times) - 1)
