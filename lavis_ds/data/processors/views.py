"""What a picture becomes: views of one size, or patches at its own size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int, int]
"""Patches along time, height and width."""


@dataclass(frozen=True)
class Views:
    """One picture, processed.

    Attributes:
        pixels: (V, 3, H, W) uint8; at native resolution (V, D), a patch a row.
        grid: patches along time, height and width, V in all; None at a fixed size.
    """

    pixels: Tensor
    grid: Grid | None = None

    def __len__(self) -> int:
        """V."""
        return int(self.pixels.shape[0])


def as_views(pixels: Tensor | Views) -> Views:
    """A (3, H, W) or (V, 3, H, W) tensor as views."""
    if isinstance(pixels, Views):
        return pixels
    return Views(pixels if pixels.dim() == 4 else pixels[None])
