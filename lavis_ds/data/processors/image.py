"""Picture files to pixels: one way to open them, one processor for training and one for evaluation."""

from __future__ import annotations

import math
import warnings

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

from lavis_ds.data.configs import ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.processors.base import ImageProcessor
from lavis_ds.errors import DataError

Box = tuple[float, float, float, float]

_BICUBIC = PIL.Image.Resampling.BICUBIC
_WHITE, _GREY = (255, 255, 255), (127, 127, 127)
_ASPECT_RATIOS = (3 / 4, 4 / 3)
_ATTEMPTS = 10


def open_image(path: str) -> PIL.Image.Image:
    """The picture in `path` as RGB: upright (EXIF orientation applied), transparency on white, 16-bit grey scaled to 8.

    Raises:
        DataError: there is no such file, it can't be read to its end, or it claims more pixels than Pillow holds for
            safe (`PIL.Image.MAX_IMAGE_PIXELS`).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(path) as image:
                image.load()
                return _to_rgb(PIL.ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise DataError(
            "there is no such image file.", where=path, hint="Check `image_root` and the annotations."
        ) from None
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise DataError(
            f"the image is too large: {error}", where=path, hint="Scale it down, or leave the sample out."
        ) from None
    except Exception as error:  # decoders raise whatever they like on damaged files
        raise DataError(
            f"the image can't be read: {type(error).__name__}: {error}.",
            where=path,
            hint="Replace the file, or leave the sample out.",
        ) from error


def _to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "F":
        raise ValueError("its 32-bit float pixels have no defined range; store 8 or 16 bits")
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        canvas = PIL.Image.new("RGBA", rgba.size, (*_WHITE, 255))
        return PIL.Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: PIL.Image.Image) -> PIL.Image.Image:
    """Pillow's own conversion clips at 255, which turns 16-bit pictures white."""
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError(f"its pixels range from {pixels.min()} to {pixels.max()}; store 8 or 16 bits")
    return PIL.Image.fromarray(((pixels + 128) // 257).astype(np.uint8)).convert("RGB")


def to_tensor(image: PIL.Image.Image) -> Tensor:
    """RGB picture -> (3, H, W) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class ImageTrain(ImageProcessor):
    """Random resized crop (torchvision's sampling), then random mirroring where asked for."""

    Config = ImageTrainConfig
    config: ImageTrainConfig

    def __call__(self, image: PIL.Image.Image, rng: np.random.Generator) -> Tensor:
        size = self.config.image_size
        image = image.resize((size, size), _BICUBIC, box=self._crop(image.width, image.height, rng))
        if self.config.horizontal_flip and rng.random() < 0.5:
            image = PIL.ImageOps.mirror(image)
        if self.config.vertical_flip and rng.random() < 0.5:
            image = PIL.ImageOps.flip(image)
        return self._shifted(to_tensor(image), rng)

    def _shifted(self, pixels: Tensor, rng: np.random.Generator) -> Tensor:
        """The picture moved by a whole number of pixels each way; its edge fills what it leaves."""
        reach = self.config.max_shift
        if reach == 0:
            return pixels
        top, left = rng.integers(2 * reach + 1, size=2)
        size = self.config.image_size
        padded = np.pad(pixels.numpy(), ((0, 0), (reach, reach), (reach, reach)), mode="edge")
        return torch.from_numpy(padded[:, top : top + size, left : left + size].copy())

    def _crop(self, width: int, height: int, rng: np.random.Generator) -> Box:
        if self.config.min_scale == 1:
            return 0, 0, width, height
        for _ in range(_ATTEMPTS):
            area = width * height * rng.uniform(self.config.min_scale, self.config.max_scale)
            ratio = math.exp(rng.uniform(*np.log(_ASPECT_RATIOS)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
                return int(left), int(top), int(left + w), int(top + h)
        return _centre_crop(width, height, min(max(width / height, _ASPECT_RATIOS[0]), _ASPECT_RATIOS[1]))


class ImageEval(ImageProcessor):
    """Resize to a square without randomness: squash it, crop its centre, or pad it with grey."""

    Config = ImageEvalConfig
    config: ImageEvalConfig

    def __call__(self, image: PIL.Image.Image, rng: np.random.Generator) -> Tensor:
        size = self.config.image_size
        if self.config.resize == "pad":
            return to_tensor(PIL.ImageOps.pad(image, (size, size), _BICUBIC, color=_GREY))
        box = _centre_crop(image.width, image.height, 1.0) if self.config.resize == "crop" else None
        return to_tensor(image.resize((size, size), _BICUBIC, box=box))


def _centre_crop(width: int, height: int, ratio: float) -> Box:
    """The largest centred box of the given width / height."""
    w, h = min(width, height * ratio), min(height, width / ratio)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2
