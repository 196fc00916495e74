"""Samples on one HTML page: the originals, what the model sees of them, and the text with its trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
from torch import Tensor

from lavis_ds.data.processors.open_image import open_image
from lavis_ds.runners.data_tools import terminal
from lavis_ds.runners.data_tools.samples import Look, Picture
from lavis_ds.runners.data_tools.token_text import visible
from lavis_ds.runners.report import page, pictures

_ORIGINAL, _VIEW = 320, 448
"""Most pixels a side that originals and views are embedded with."""


@dataclass(frozen=True)
class Shown:
    """A picture as the page shows it."""

    name: str
    about: str
    original: pictures.Picture
    views: list[pictures.Picture]


def write_sheet(path: Path, looks: Sequence[Look], title: str) -> Path:
    """Write the page, and return its path. It loads nothing, and every text of the data is escaped."""
    samples = [(look, list(terminal.counts(look)), [_shown(picture) for picture in look.pictures]) for look in looks]
    template = Path(__file__).with_name("sheet.html")
    return page.write(path, page.render(template, title=title, samples=samples, label=terminal.label))


def _shown(picture: Picture) -> Shown:
    width, height = picture.size
    original = open_image(picture.image, max_pixels=width * height)
    return Shown(
        visible(picture.image.path[:200]),
        terminal.about_picture(picture),
        pictures.embed(original, _ORIGINAL),
        [pictures.embed(_image(view), _VIEW) for view in picture.views],
    )


def _image(view: Tensor) -> PIL.Image.Image:
    return PIL.Image.fromarray(view.permute(1, 2, 0).numpy())
