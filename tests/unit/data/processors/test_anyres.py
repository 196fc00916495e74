from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from lavis_ds.config.decode import decode
from lavis_ds.data.configs import ImageAnyResConfig
from lavis_ds.data.conversation import Image
from lavis_ds.data.processors.anyres import ImageAnyRes
from lavis_ds.data.processors.image import ImageEval
from lavis_ds.errors import ConfigError

LLAVA = [(2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]
RNG = np.random.default_rng(0)
GREY = 127


def make(**options: Any) -> ImageAnyRes:
    return ImageAnyRes(decode(ImageAnyResConfig, {"image_size": 8, **options}))


def squares(columns: int, rows: int, size: int) -> PIL.Image.Image:
    """A picture of plain squares, each of another red, from the top left."""
    red = np.arange(1, columns * rows + 1, dtype=np.uint8).reshape(rows, columns) * 20
    pixels = np.zeros((rows * size, columns * size, 3), np.uint8)
    pixels[..., 0] = red.repeat(size, 0).repeat(size, 1)
    return PIL.Image.fromarray(pixels)


@pytest.mark.parametrize(
    "options",
    [{"max_tiles": 1}, {"max_tiles": 6}, {"max_tiles": 12, "thumbnail": False}, {"grids": LLAVA, "resize": "squash"}],
)
def test_the_number_of_views_told_is_that_made(options: dict[str, Any]) -> None:
    process = make(**options)
    rng = np.random.default_rng(1)
    sizes = [*(2 ** rng.uniform(0, 9, (300, 2))).astype(int).tolist(), [1, 1], [3000, 1], [1, 3000], [8, 8], [16, 8]]
    seen = set()
    for width, height in sizes:
        views = process(PIL.Image.new("RGB", (width, height)), RNG)
        assert views.shape[1:] == (3, 8, 8)
        assert len(views) == process.num_views(width, height), (width, height)
        seen.add(len(views))
    assert options == {"max_tiles": 1} or len(seen) > 1


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((672, 336), (2, 1)),
        ((336, 672), (1, 2)),
        ((672, 672), (2, 2)),
        ((2000, 2000), (2, 2)),
        ((3000, 1000), (3, 1)),
        ((500, 2000), (1, 3)),
        # Both grids of two tiles keep all of it and waste the same: the one of its own shape shows it larger.
        ((300, 200), (2, 1)),
        ((200, 300), (1, 2)),
    ],
)
def test_the_grid_keeps_most_and_then_wastes_least(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert make(image_size=336, grids=LLAVA).grid(*size) == grid


def test_the_grid_is_the_one_of_the_published_rule() -> None:
    """LLaVA's `select_best_resolution`, written as it is there."""
    process, rng = make(image_size=336, grids=LLAVA), np.random.default_rng(0)
    for width, height in rng.integers(50, 3000, (500, 2)).tolist():
        fits = []
        for columns, rows in process._grids:
            scale = min(columns * 336 / width, rows * 336 / height)
            kept = min(int(width * scale + 1e-9) * int(height * scale + 1e-9), width * height)
            fits.append((kept, kept - columns * rows * 336**2))
        assert fits[process._grids.index(process.grid(width, height))] == max(fits)


@pytest.mark.parametrize("thumbnail", [True, False])
def test_tiles_stand_row_by_row_behind_the_whole_picture(thumbnail: bool) -> None:
    image = squares(3, 2, 8)
    views = make(max_tiles=6, thumbnail=thumbnail)(image, RNG)
    assert len(views) == 6 + thumbnail
    tiles = views[int(thumbnail) :]
    assert [tile[0].unique().tolist() for tile in tiles] == [[20], [40], [60], [80], [100], [120]]
    if thumbnail:
        assert torch.equal(views[0], ImageEval(ImageEval.Config(image_size=8))(image, RNG))


def test_a_picture_for_which_one_tile_does_is_one_view() -> None:
    image = squares(1, 1, 6)
    assert make(max_tiles=4).num_views(6, 6) == 1
    plain = ImageEval(ImageEval.Config(image_size=8))(image, RNG)
    assert torch.equal(make(max_tiles=4)(image, RNG), plain[None])


def test_padding_keeps_the_shape_and_squashing_fills_the_grid() -> None:
    image = PIL.Image.new("RGB", (32, 8), (255, 0, 0))
    padded = make(grids=[[2, 1]], thumbnail=False)(image, RNG)
    assert (padded[:, :, :2] == GREY).all()
    assert (padded[:, :, 6:] == GREY).all()
    assert (padded[:, 0, 2:6] == 255).all()
    squashed = make(grids=[[2, 1]], thumbnail=False, resize="squash")(image, RNG)
    assert (squashed[:, 0] == 255).all()
    assert (squashed[:, 1:] == 0).all()


def test_views_of_a_file_are_counted_by_its_header() -> None:
    image = Image("row 7", PIL.Image.new("RGB", (24, 16)))
    assert make(max_tiles=6).count_views(image) == 7
    assert ImageEval(ImageEval.Config()).count_views(Image("/no/such/file.png")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either max_tiles or grids"),
        ({"max_tiles": 4, "grids": [[1, 1]]}, "either max_tiles or grids"),
        ({"grids": [[0, 2]]}, "grids"),
        ({"grids": []}, "grids"),
        ({"max_tiles": 0}, "max_tiles"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)
