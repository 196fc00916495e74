"""Pictures at their own size and shape in patches, for vision encoders that take any number of them (Qwen-VL)."""

from __future__ import annotations

import numpy as np
import PIL.Image
from torch import Tensor

from lavis_ds.data.configs import ImageNativeConfig
from lavis_ds.data.processors.base import ImageProcessor
from lavis_ds.data.processors.image import resized
from lavis_ds.data.processors.open_image import to_tensor
from lavis_ds.data.processors.views import Grid, Views
from lavis_ds.errors import DataError

_FRAMES = 2  # of a patch; a picture is two equal frames


class ImageNative(ImageProcessor):
    """Picture -> (P, D) uint8 patches, its sides rounded to whole squares of patches.

    Rows and columns are those of transformers' Qwen2-VL image processor, so P = grid[0] * grid[1] * grid[2] and
    D = 3 * 2 * patch_size ** 2. There is no randomness, so training and evaluation see the same.

    Source: https://github.com/huggingface/transformers, models/qwen2_vl/image_processing_qwen2_vl.py.
    """

    Config = ImageNativeConfig
    config: ImageNativeConfig

    def num_views(self, width: int, height: int) -> int:
        _, rows, columns = self.grid(width, height)
        return rows * columns

    def grid(self, width: int, height: int) -> Grid:
        """Patches along time, height and width of a picture of this size.

        Raises:
            DataError: the picture is more than 200 times as long as it is wide.
        """
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # takes seconds

        config = self.config
        try:
            new_height, new_width = smart_resize(
                height, width, config.patch_size * config.merge_size, config.min_pixels, config.max_pixels
            )
        except ValueError:
            raise DataError(
                "the image is too long and thin.", given=f"{width} x {height} pixels", expected="at most 200 : 1"
            ) from None
        return 1, new_height // config.patch_size, new_width // config.patch_size

    def __call__(self, image: PIL.Image.Image | Tensor, rng: np.random.Generator) -> Views:
        pixels = to_tensor(image)
        grid = self.grid(pixels.shape[2], pixels.shape[1])
        _, rows, columns = grid
        size, merge = self.config.patch_size, self.config.merge_size
        whole = resized(pixels, columns * size, rows * size)
        blocks = whole.view(3, rows // merge, merge, size, columns // merge, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
        patches = blocks[..., None, :, :].expand(-1, -1, -1, -1, -1, _FRAMES, -1, -1)
        return Views(patches.reshape(rows * columns, -1), grid)


def unpatched(patches: Tensor, grid: Grid, merge_size: int) -> Tensor:
    """(3, H, W) of the first frame of (P, D) patches."""
    _, rows, columns = grid
    size = int((patches.shape[1] // (3 * _FRAMES)) ** 0.5)
    blocks = patches.view(rows // merge_size, columns // merge_size, merge_size, merge_size, 3, _FRAMES, size, size)[
        ..., 0, :, :
    ]
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * size, columns * size)
