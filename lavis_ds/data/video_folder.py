"""Videos that are a folder of frames, one picture file each."""

from __future__ import annotations

import os
import re

from lavis_ds.errors import DataError

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_NUMBER = re.compile(r"([0-9]+)")


def frame_files(folder: str) -> list[str]:
    """Paths of the pictures in `folder`, `frame_9` before `frame_10`.

    Raises:
        DataError: there are none.
    """
    names = [name for name in os.listdir(folder) if name.lower().endswith(_ENDINGS) and not name.startswith(".")]
    if not names:
        raise DataError(
            "the folder holds no frames.", where=folder, expected=f"files that end in {', '.join(_ENDINGS)}"
        )
    return [os.path.join(folder, name) for name in sorted(names, key=_natural)]


def _natural(name: str) -> tuple[list[int | str], str]:
    """Runs of digits count as numbers; every second piece is one. The name tells `1.png` from `01.png`."""
    pieces = _NUMBER.split(name)
    return [int(piece) if position % 2 else piece for position, piece in enumerate(pieces)], name
