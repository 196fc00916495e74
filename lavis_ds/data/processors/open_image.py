"""Pictures as people have them -> RGB pixels, upright, or a refusal that says why."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import PIL.Image
import PIL.ImageFile
import torch
from PIL.Image import Transpose
from torch import Tensor

from lavis_ds.data.conversation import Image
from lavis_ds.errors import DataError

try:
    import simplejpeg
except ModuleNotFoundError:
    simplejpeg = None

MAX_PIXELS = 89_478_485
"""Width times height from which Pillow warns of a decompression bomb."""

MinSize = Callable[[int, int], tuple[int, int] | None]
"""(width, height) of a picture, upright -> the smallest (width, height) to decode it at; None for all of it."""

_WHITE = (255, 255, 255)
_ORIENTATION = 0x0112
_JPEG, _APP1, _START_OF_SCAN = b"\xff\xd8\xff", 0xE1, 0xDA
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
"""EXIF orientation -> what turns the picture upright."""


def open_image(image: Image, *, max_pixels: int = MAX_PIXELS, min_size: MinSize | None = None) -> PIL.Image.Image:
    """The picture as RGB: upright (EXIF orientation applied), transparency on white, 16-bit grey scaled to 8.

    Of an animation it is the first frame.

    Args:
        image: a file, a base64 `data:` URL, a file's bytes, or pixels.
        max_pixels: refuse pictures with more pixels than this, before they are decoded.
        min_size: where given, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, but no smaller than this says.

    Raises:
        DataError: there is no such file, it can't be read to its end, or it has too many pixels.
    """
    with _opened(image, max_pixels) as picture:
        orientation = _orientation(picture)
        _scale(picture, orientation, min_size)
        picture.load()
        rgb = _to_rgb(picture)
        return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def open_pixels(image: Image, *, max_pixels: int = MAX_PIXELS, min_size: MinSize | None = None) -> Tensor:
    """(3, H, W) uint8: the pixels of what `open_image` gives.

    JPEGs are decoded by simplejpeg where it is installed: the same pixels in less time. What it can't decode, Pillow
    decodes, or refuses with the better message.
    """
    pixels = _plain_jpeg(image, max_pixels, min_size)
    if pixels is not None:
        return pixels
    with _opened(image, max_pixels) as picture:
        pixels = _decode_jpeg(picture, min_size) if not isinstance(image.data, PIL.Image.Image) else None
    return to_tensor(open_image(image, max_pixels=max_pixels, min_size=min_size)) if pixels is None else pixels


def to_tensor(image: PIL.Image.Image | Tensor) -> Tensor:
    """RGB picture -> (3, H, W) uint8; a tensor is left as it is."""
    return image if isinstance(image, Tensor) else torch.from_numpy(np.array(image)).permute(2, 0, 1)


def image_size(image: Image, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of what `open_image` gives, in pixels, read from the file's header alone.

    Raises:
        DataError: as `open_image`, as far as the header shows.
    """
    with _opened(image, max_pixels) as picture:
        return _upright_size(picture, _orientation(picture))


@contextmanager
def _opened(image: Image, max_pixels: int) -> Iterator[PIL.Image.Image]:
    """The picture, its header read; whatever goes wrong inside is about this file."""
    name = image.path if len(image.path) <= 200 else f"{image.path[:60]}... ({len(image.path):,} characters)"
    try:
        if isinstance(image.data, PIL.Image.Image):
            _check_pixels(image.data, max_pixels, name)
            yield image.data
            return
        source = image.path if image.data is None else io.BytesIO(image.data)
        if image.data is None and image.path.startswith("data:"):
            source = io.BytesIO(_from_data_url(image.path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # we have a limit of our own
            picture = PIL.Image.open(source)
        with picture:
            _check_pixels(picture, max_pixels, name)
            yield picture
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(
            "there is no such image file.", where=name, hint="Check `image_root` and the annotations."
        ) from None
    except PIL.Image.DecompressionBombError as error:
        raise DataError(
            f"the image is too large: {error}", where=name, hint="Scale it down, or leave the sample out."
        ) from None
    except Exception as error:  # decoders raise whatever they like on damaged files
        raise DataError(
            f"the image can't be read: {type(error).__name__}: {error}.",
            where=name,
            hint="Replace the file, or leave the sample out.",
        ) from error


def _check_pixels(picture: PIL.Image.Image, max_pixels: int, name: str) -> None:
    if picture.width * picture.height > max_pixels:
        raise DataError(
            "the image is too large.",
            where=name,
            given=f"{picture.width} x {picture.height} = {picture.width * picture.height:,} pixels",
            expected=f"at most {max_pixels:,}",
            hint="Scale it down, or raise `max_file_pixels` of the vis_processor.",
        )


def _from_data_url(url: str) -> bytes:
    head, _, payload = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"the URL begins with {head[:40]!r}, not with data:image/...;base64,")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its base64 is damaged: {error}") from None


def _orientation(picture: PIL.Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 where there is none, and for TIFF, which Pillow turns by itself.

    Pillow's own reader of PNG decodes the whole picture to look for EXIF behind it, which no common writer puts there.
    """
    if picture.format == "TIFF":
        return 1
    return int(PIL.Image.Image.getexif(picture).get(_ORIENTATION, 1))


def _upright_size(picture: PIL.Image.Image, orientation: int) -> tuple[int, int]:
    return (picture.height, picture.width) if orientation >= 5 else (picture.width, picture.height)


def _plain_jpeg(image: Image, max_pixels: int, min_size: MinSize | None) -> Tensor | None:
    """As `_decode_jpeg`, without Pillow, whose look at the header costs a fifth of decoding; None leaves it to Pillow.

    That is so for what is no sound JPEG of a usual kind, is too large, or may have to be turned (EXIF and XMP say so in
    segments APP1).
    """
    if simplejpeg is None or isinstance(image.data, PIL.Image.Image) or image.path.startswith("data:"):
        return None
    try:
        if image.data is None:
            with open(image.path, "rb") as file:
                data = file.read()
        else:
            data = image.data
        if not data.startswith(_JPEG) or _has_segment(data, _APP1):
            return None
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors not in ("YCbCr", "RGB", "Gray") or width * height > max_pixels:
            return None
        wanted = min_size(width, height) if min_size is not None else None
        scale = min(width // wanted[0], height // wanted[1]) if wanted is not None else 1
        divisor = next((d for d in (8, 4, 2) if scale >= d), 1)  # as Pillow's `draft` has it
        least = {"min_width": -(-width // divisor), "min_height": -(-height // divisor)} if divisor > 1 else {}
        return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB", **least)).permute(2, 0, 1)
    except (OSError, ValueError):
        return None


def _has_segment(data: bytes, marker: int) -> bool:
    """Whether a JPEG has a segment of this kind before its pixels; True, too, where the segments can't be followed."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] in (marker, _START_OF_SCAN):
            return data[at + 1] == marker
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return True


def _decode_jpeg(picture: PIL.Image.Image, min_size: MinSize | None) -> Tensor | None:
    """(3, H, W) uint8, upright; None where the picture is no JPEG that simplejpeg can decode."""
    is_plain = picture.format in ("JPEG", "MPO") and picture.mode in ("RGB", "L")
    if simplejpeg is None or not is_plain or not isinstance(picture, PIL.ImageFile.ImageFile) or picture.fp is None:
        return None
    whole, orientation = picture.size, _orientation(picture)
    _scale(picture, orientation, min_size)
    least = {} if picture.size == whole else {"min_width": picture.width, "min_height": picture.height}
    picture.fp.seek(0)
    try:
        pixels = simplejpeg.decode_jpeg(picture.fp.read(), "RGB", **least)
    except ValueError:
        return None
    return _upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation)


def _scale(picture: PIL.Image.Image, orientation: int, min_size: MinSize | None) -> None:
    """Have a JPEG decoded at a fraction of its size, by libjpeg's DCT, where that is enough."""
    wanted = min_size(*_upright_size(picture, orientation)) if min_size is not None else None
    if wanted is not None:
        width, height = wanted
        picture.draft(None, (height, width) if orientation >= 5 else (width, height))


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    """As `_UPRIGHT`, for (3, H, W)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 2)
    axes = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return pixels.flip(axes) if axes else pixels


def _to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
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
