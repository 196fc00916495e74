"""Pictures and videos at their own size and shape in patches, for vision encoders that take any number (Qwen-VL)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from lavis_ds.data.configs import ImageNativeConfig
from lavis_ds.data.conversation import Image
from lavis_ds.data.processors.base import ImageProcessor
from lavis_ds.data.processors.image import resized
from lavis_ds.data.processors.open_image import image_size, to_tensor
from lavis_ds.data.processors.views import FRAMES_A_STEP, Grid, Views
from lavis_ds.errors import DataError

Frames = Sequence[tuple[float, Image]]
"""Frames of a video, each with its time in seconds."""

Size = tuple[int, int]
"""Height and width in pixels."""

Resize = Callable[[Size, int, tuple[int, int]], Size]
"""Size, a side's unit, and least and most pixels -> the size to give a picture."""


class ImageNative(ImageProcessor):
    """Picture or video -> (P, D) uint8 patches, its sides rounded to whole squares of patches.

    Rows and columns are those of transformers' Qwen2-VL image processor, so P = grid[0] * grid[1] * grid[2] and
    D = 3 * 2 * patch_size ** 2. There is no randomness, so training and evaluation see the same. The frames of a video
    have one size; two neighbours share a patch, and the last of an odd number stands for two.

    Source: https://github.com/huggingface/transformers, models/qwen2_vl/image_processing_qwen2_vl.py,
    models/qwen2_vl/video_processing_qwen2_vl.py and models/qwen3_vl/video_processing_qwen3_vl.py.
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
        bounds = self.config.min_pixels, self.config.max_pixels
        return self._grid(1, (height, width), _resize_frame, bounds)

    def video_grid(self, num_frames: int, width: int, height: int) -> Grid:
        """Patches along time, height and width of a video of so many frames of this size.

        Raises:
            DataError: its frames are more than 200 times as long as they are wide.
        """
        bounds = self.config.video_min_pixels, self.config.video_max_pixels
        resize = _resize_frame if self.config.video_limits == "frame" else partial(_resize_video, num_frames)
        return self._grid(num_frames, (height, width), resize, bounds)

    def __call__(self, image: PIL.Image.Image | Tensor, rng: np.random.Generator) -> Views:
        pixels = to_tensor(image)
        grid = self.grid(pixels.shape[2], pixels.shape[1])
        frames = self._resized(pixels, grid)[None].expand(FRAMES_A_STEP, -1, -1, -1)
        return Views(_patches(frames, grid, self.config.merge_size), grid)

    def video(self, frames: Frames) -> Views:
        """Patches of all frames.

        Raises:
            DataError: a frame can't be read, has another size than the first, or is too long and thin.
        """
        first = to_tensor(self.open(frames[0][1]))
        grid = self.video_grid(len(frames), first.shape[2], first.shape[1])
        pixels = [self._resized(first, grid)]
        for _, image in frames[1:]:
            frame = to_tensor(self.open(image))
            if frame.shape != first.shape:
                raise _another_size(image, frame, first)
            pixels.append(self._resized(frame, grid))
        pixels += pixels[-1:] * (-len(pixels) % FRAMES_A_STEP)
        return Views(_patches(torch.stack(pixels), grid, self.config.merge_size), grid, _times(frames))

    def video_without_pixels(self, frames: Frames) -> Views:
        """As many views as `video` would give, each empty. Of the frames only the first one's header is read.

        Raises:
            DataError: it can't be read, or is too long and thin.
        """
        size = image_size(frames[0][1], max_pixels=self.config.max_file_pixels)
        steps, rows, columns = self.video_grid(len(frames), *size)
        return Views(torch.empty((steps * rows * columns, 3, 0, 0), dtype=torch.uint8), times=_times(frames))

    def _grid(self, num_frames: int, size: Size, resize: Resize, bounds: tuple[int, int]) -> Grid:
        patch = self.config.patch_size
        try:
            height, width = resize(size, patch * self.config.merge_size, bounds)
        except ValueError:
            raise DataError(
                "the image is too long and thin.", given=f"{size[1]} x {size[0]} pixels", expected="at most 200 : 1"
            ) from None
        return -(-num_frames // FRAMES_A_STEP), height // patch, width // patch

    def _resized(self, pixels: Tensor, grid: Grid) -> Tensor:
        _, rows, columns = grid
        return resized(pixels, columns * self.config.patch_size, rows * self.config.patch_size)


def unpatched(patches: Tensor, grid: Grid, merge_size: int) -> Tensor:
    """(F, 3, H, W), all frames of (P, D) patches; two equal ones of a picture."""
    steps, rows, columns = grid
    size = int((patches.shape[1] // (3 * FRAMES_A_STEP)) ** 0.5)
    squares = (rows // merge_size, columns // merge_size, merge_size, merge_size)
    blocks = patches.view(steps, *squares, 3, FRAMES_A_STEP, size, size)
    return blocks.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, 3, rows * size, columns * size)


def _resize_frame(size: Size, unit: int, bounds: tuple[int, int]) -> Size:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # takes seconds

    made: Size = smart_resize(*size, unit, *bounds)
    return made


def _resize_video(num_frames: int, size: Size, unit: int, bounds: tuple[int, int]) -> Size:
    """As `_resize_frame`, but the bounds are of all frames together."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize  # takes seconds

    made: Size = smart_resize(max(num_frames, FRAMES_A_STEP), *size, FRAMES_A_STEP, unit, *bounds)
    return made


def _patches(frames: Tensor, grid: Grid, merge_size: int) -> Tensor:
    """(P, D) patches of (F, 3, H, W) frames."""
    steps, rows, columns = grid
    size = frames.shape[-1] // columns
    squares = (rows // merge_size, merge_size, size, columns // merge_size, merge_size, size)
    blocks = frames.view(steps, FRAMES_A_STEP, 3, *squares).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return blocks.reshape(steps * rows * columns, -1)


def _times(frames: Frames) -> tuple[float, ...]:
    return tuple(time for time, _ in frames)


def _another_size(image: Image, frame: Tensor, first: Tensor) -> DataError:
    return DataError(
        "the frames of the video differ in size.",
        where=image.path,
        given=f"{frame.shape[2]} x {frame.shape[1]} pixels",
        expected=f"{first.shape[2]} x {first.shape[1]}, as the first frame",
        hint="Scale them to one size, or leave the sample out.",
    )
