"""Pictures as a part of an HTML page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

_TINY = 96
"""Pictures up to this many pixels a side are embedded without loss and enlarged with hard edges."""


@dataclass(frozen=True)
class Picture:
    """An embedded picture; `uri` is empty where the file can't be read."""

    uri: str
    is_tiny: bool


NO_PICTURE = Picture("", False)


def embed(image: Image.Image, max_size: int) -> Picture:
    """The picture as a data URI, transparency on white, scaled down to at most `max_size` pixels a side."""
    is_tiny = max(image.size) <= _TINY
    rgba = image.convert("RGBA")
    rgba.thumbnail((max_size, max_size))
    flat = Image.new("RGB", rgba.size, "white")
    flat.paste(rgba, mask=rgba.getchannel("A"))
    buffer = io.BytesIO()
    if is_tiny:
        flat.save(buffer, "PNG", optimize=True)
    else:
        flat.save(buffer, "JPEG", quality=85)
    kind = "png" if is_tiny else "jpeg"
    return Picture(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}", is_tiny)
