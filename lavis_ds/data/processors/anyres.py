"""Large pictures in tiles: a grid of squares as near to the picture's own size and shape as the options allow."""

from __future__ import annotations

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from lavis_ds.data.configs import ImageAnyResConfig
from lavis_ds.data.processors.base import ImageProcessor
from lavis_ds.data.processors.image import padded, resized
from lavis_ds.data.processors.open_image import to_tensor

Grid = tuple[int, int]


class ImageAnyRes(ImageProcessor):
    """Picture -> (V, 3, H, W): the whole picture small, then its tiles row by row from the top left.

    A picture for which one tile does is one view. There is no randomness, so training and evaluation see the same.

    Source: LLaVA-1.6 (https://llava-vl.github.io/blog/2024-01-30-llava-next/) for the choice of the grid, InternVL 1.5
    (https://arxiv.org/abs/2404.16821) for all grids up to a number of tiles.
    """

    Config = ImageAnyResConfig
    config: ImageAnyResConfig

    def __init__(self, config: ImageAnyResConfig) -> None:
        super().__init__(config)
        limit = range(1, (config.max_tiles or 0) + 1)
        grids = config.grids or [(columns, rows) for columns in limit for rows in limit if columns * rows <= limit[-1]]
        self._grids: list[Grid] = sorted(grids, key=lambda grid: (grid[0] * grid[1], grid))

    def num_views(self, width: int, height: int) -> int:
        columns, rows = self.grid(width, height)
        return columns * rows + int(self.config.thumbnail and columns * rows > 1)

    def grid(self, width: int, height: int) -> Grid:
        """(columns, rows) that keep most of the picture's pixels and, among those, leave least of the grid unused."""
        return max(self._grids, key=lambda grid: self._fit(width, height, grid))

    def _fit(self, width: int, height: int, grid: Grid) -> tuple[int, int, int]:
        """Pixels of the picture that remain, minus those of the grid that are then too many, and those it covers."""
        grid_width, grid_height = (count * self.config.image_size for count in grid)
        if grid_width * height <= grid_height * width:
            scaled = grid_width * (grid_width * height // width)
        else:
            scaled = grid_height * (grid_height * width // height)
        kept = min(scaled, width * height)
        return kept, kept - grid_width * grid_height, scaled

    def __call__(self, image: PIL.Image.Image | Tensor, rng: np.random.Generator) -> Tensor:
        pixels, size = to_tensor(image), self.config.image_size
        columns, rows = self.grid(pixels.shape[2], pixels.shape[1])
        fill = padded if self.config.resize == "pad" else resized
        whole = fill(pixels, columns * size, rows * size)
        tiles = whole.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4).reshape(-1, 3, size, size)
        if not self.config.thumbnail or len(tiles) == 1:
            return tiles
        return torch.cat([resized(pixels, size, size)[None], tiles])
