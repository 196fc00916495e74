from __future__ import annotations

from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import Qwen2VLImageProcessor

from lavis_ds.data.configs import ImageNativeConfig
from lavis_ds.data.processors.mrope import mrope_positions
from lavis_ds.data.processors.native import ImageNative, unpatched
from lavis_ds.data.processors.views import Views
from lavis_ds.errors import DataError

RNG = np.random.default_rng(0)
SIZES = [(64, 48), (1, 1), (333, 77), (30, 900), (2000, 1500), (28, 28), (57, 113)]


def make(**options: Any) -> ImageNative:
    given = {"patch_size": 14, "min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 40}
    return ImageNative(ImageNativeConfig(**{**given, **options}))


def picture(width: int, height: int) -> PIL.Image.Image:
    small = np.random.default_rng(width).integers(0, 256, (5, 7, 3), np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_patches_are_those_of_transformers(width: int, height: int) -> None:
    process = make()
    views = process(picture(width, height), RNG)
    assert isinstance(views, Views)
    reference: Any = Qwen2VLImageProcessor(
        size={"shortest_edge": process.config.min_pixels, "longest_edge": process.config.max_pixels},
        do_rescale=False,
        do_normalize=False,
    )
    expected = reference(picture(width, height), return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [list(views.grid or ())]
    assert views.pixels.shape == expected["pixel_values"].shape
    assert len(views) == process.num_views(width, height)
    difference = (views.pixels.float() - expected["pixel_values"].float()).abs()
    assert difference.mean() < 0.1  # levels of 255; measured 0 to 0.01: the resize kernels round differently
    assert difference.max() <= 3


def test_patches_can_be_put_together_again() -> None:
    process = make()
    views = process(picture(64, 48), RNG)
    assert views.grid is not None
    whole = unpatched(views.pixels, views.grid, 2)
    assert whole.shape == (2, 3, views.grid[1] * 14, views.grid[2] * 14)
    assert torch.equal(whole[0], whole[1])
    again = process(whole[0], RNG)
    assert torch.equal(again.pixels, views.pixels)


def test_bounds_hold_and_must_be_in_order() -> None:
    for width, height in SIZES:
        _, rows, columns = make().grid(width, height)
        assert rows % 2 == columns % 2 == 0
        assert 28 * 28 * 4 <= rows * columns * 14**2 <= 28 * 28 * 40
    with pytest.raises(ValueError, match="min_pixels"):
        make(min_pixels=10**6)


def test_extreme_shapes_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"too long and thin.*10 x 2010"):
        make().grid(10, 2010)


@pytest.mark.parametrize(
    "layout",
    [
        [5],
        [3, (1, 4, 6), 2],
        [(1, 2, 2), 1, (1, 6, 4), 2, (1, 2, 8), 4],
    ],
    ids=["text", "one picture", "three pictures"],
)
def test_positions_are_those_of_transformers(layout: list[Any]) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    ids: list[int] = []
    pictures, grids = [], []
    for part in layout:
        if isinstance(part, int):
            ids += range(20, 20 + part)
        else:
            number = part[1] * part[2] // 4
            pictures.append(range(len(ids), len(ids) + number))
            grids.append(part)
            ids += [1] * number
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                     "intermediate_size": 32, "vocab_size": 64},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32},
        image_token_id=1, video_token_id=2, vision_start_token_id=3,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen2_5_VLModel(config)
    input_ids = torch.tensor([ids])
    given = {"input_ids": input_ids, "image_grid_thw": torch.tensor(grids) if grids else None}
    try:  # since transformers 5.?, the kind of each token is given instead of looked for
        expected, _ = model.get_rope_index(**given, mm_token_type_ids=(input_ids == 1).int())
    except TypeError:
        expected, _ = model.get_rope_index(**given)
    shown = [(grid, 1.0) for grid in grids]
    assert mrope_positions(len(ids), pictures, shown, 2).tolist() == expected[:, 0].tolist()
