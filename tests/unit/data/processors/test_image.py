from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import ImageProcessorsConfig
from lavis_ds.data.configs import ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.conversation import Image
from lavis_ds.data.processors.anyres import ImageAnyRes
from lavis_ds.data.processors.image import ImageEval, ImageTrain, resized
from lavis_ds.data.processors.open_image import to_tensor
from lavis_ds.errors import ConfigError, DataError

RED = (255, 0, 0)


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Red grows to the right, green downward."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return PIL.Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestImageTrain:
    def make(self, **options: Any) -> ImageTrain:
        return ImageTrain(ImageTrainConfig(image_size=16, **options))

    def test_scale_1_is_a_plain_resize(self) -> None:
        image = gradient(40, 20)
        plain = ImageEval(ImageEvalConfig(image_size=16))(image, rng())
        result = self.make(min_scale=1, max_scale=1)(image, rng())
        assert torch.equal(result, plain)
        assert (result.shape, result.dtype) == ((3, 16, 16), torch.uint8)

    def test_same_seed_same_crop_and_other_seed_another(self) -> None:
        image, process = gradient(64, 64), self.make(min_scale=0.2)
        assert torch.equal(process(image, rng(1)), process(image, rng(1)))
        assert not torch.equal(process(image, rng(1)), process(image, rng(2)))

    def test_crops_keep_the_share_of_the_area_asked_for(self) -> None:
        process = self.make(min_scale=0.3, max_scale=0.6)
        boxes = [process._crop(200, 100, rng(seed)) for seed in range(300)]
        shares = [(right - left) * (bottom - top) / (200 * 100) for left, top, right, bottom in boxes]
        ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
        # Sides are whole pixels: one of about 60 moves the share and the ratio by at most 2 %.
        assert min(shares) > 0.29
        assert max(shares) < 0.61
        assert max(shares) - min(shares) > 0.25
        assert min(ratios) > 0.75 * 0.98
        assert max(ratios) < 4 / 3 * 1.02
        assert all(left >= 0 and top >= 0 and right <= 200 and bottom <= 100 for left, top, right, bottom in boxes)

    def test_a_picture_too_narrow_for_any_crop_is_cropped_at_its_centre(self) -> None:
        assert self.make(min_scale=0.9)._crop(1000, 10, rng()) == (493, 0, 506, 10)

    @pytest.mark.parametrize(("option", "axis"), [("horizontal_flip", 2), ("vertical_flip", 1)])
    def test_flips_half_of_the_time(self, option: str, axis: int) -> None:
        image, process = gradient(16, 16), self.make(min_scale=1, **{option: True})
        straight, flipped = to_tensor(image), to_tensor(image).flip(axis)
        results = [process(image, rng(seed)) for seed in range(100)]
        assert all(torch.equal(r, straight) or torch.equal(r, flipped) for r in results)
        assert 30 <= sum(torch.equal(r, flipped) for r in results) <= 70  # 4 standard deviations

    def test_scales_in_the_wrong_order_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"min_scale \(0.9\) is larger than max_scale \(0.5\)"):
            decode(ImageTrainConfig, {"min_scale": 0.9, "max_scale": 0.5})


class TestImageEval:
    def make(self, resize: str) -> ImageEval:
        return ImageEval(decode(ImageEvalConfig, {"image_size": 20, "resize": resize}))

    def test_squash_keeps_the_whole_picture(self) -> None:
        red, green, _ = self.make("squash")(gradient(80, 40), rng())
        assert red[0, 0] < 10  # the first of 20 columns is the mean of four of 80: 5
        assert red[0, -1] > 245
        assert green[-1, 0] > 245

    def test_crop_keeps_the_centre_in_shape(self) -> None:
        red, green, _ = self.make("crop")(gradient(80, 40), rng())
        # Columns 20 to 60 of 80 remain, so red runs from about 66 to about 189.
        assert 60 < red[0, 0] < 72
        assert 183 < red[0, -1] < 195
        assert green[-1, 0] > 245

    def test_pad_keeps_the_picture_whole_and_in_shape_on_grey(self) -> None:
        result = self.make("pad")(gradient(80, 40), rng())
        assert (result[:, :5] == 127).all()
        assert (result[:, 15:] == 127).all()
        assert result[0, 5, -1] > 245
        assert result[1, 14, 0] > 235

    @pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
    @pytest.mark.parametrize("size", [(1, 1), (3000, 1), (1, 3000), (2, 1999)])
    def test_tiny_and_thin_pictures(self, resize: str, size: tuple[int, int]) -> None:
        result = self.make(resize)(PIL.Image.new("RGB", size, RED), rng())
        assert result.shape == (3, 20, 20)
        assert tuple(result[:, 10, 10].tolist()) == RED


def jpeg(width: int, height: int) -> Image:
    data = io.BytesIO()
    gradient(width, height).save(data, "JPEG", quality=90)
    return Image("a.jpg", data.getvalue())


class TestScaledDecode:
    """JPEGs are decoded no larger than needed, and never smaller."""

    @pytest.mark.parametrize(
        ("options", "decoded"),
        [
            ({"min_scale": 1}, (160, 120)),  # 112 pixels would be enough
            ({"min_scale": 1, "scaled_decode": False}, (640, 480)),
            # The smallest crop, a quarter of the area at 3:4, is 240 x 320: half of that is still more than 112.
            ({"min_scale": 0.25}, (320, 240)),
            ({"min_scale": 0.05}, (640, 480)),
        ],
    )
    def test_training(self, options: dict[str, Any], decoded: tuple[int, int]) -> None:
        assert ImageTrain(ImageTrainConfig(image_size=112, **options)).open(jpeg(640, 480)).shape == (3, *decoded[::-1])

    def test_every_crop_keeps_pixels_enough(self) -> None:
        process = ImageTrain(ImageTrainConfig(image_size=112, min_scale=0.25))
        for width, height in [(640, 480), (1999, 301), (460, 1700), (320, 240)]:
            opened = process.open(jpeg(width, height))
            _, opened_height, opened_width = opened.shape
            is_scaled = opened_width < width
            boxes = [process._crop(opened_width, opened_height, rng(seed)) for seed in range(200)]
            smallest = min(min(right - left, bottom - top) for left, top, right, bottom in boxes)
            assert smallest >= 112 - is_scaled, (width, height)  # sides are whole pixels
            assert is_scaled == (width != 320)

    def test_evaluation_decodes_all_unless_asked(self) -> None:
        for scaled, decoded in [(False, (640, 480)), (True, (160, 120))]:
            process = ImageEval(ImageEvalConfig(image_size=112, scaled_decode=scaled))
            assert process.open(jpeg(640, 480)).shape == (3, *decoded[::-1])

    def test_the_result_is_nearly_that_of_a_full_decode(self) -> None:
        image = jpeg(640, 480)
        results = []
        for scaled in (False, True):
            process = ImageEval(ImageEvalConfig(image_size=112, scaled_decode=scaled))
            results.append(process(process.open(image), rng()).int())
        # Measured: 0.47 levels of 255 on this picture.
        assert 0 < (results[0] - results[1]).abs().float().mean() < 1


def test_too_many_pixels_are_refused_by_the_processors_own_limit() -> None:
    process = ImageEval(ImageEvalConfig(max_file_pixels=99))
    assert process.open(Image("a.png", PIL.Image.new("RGB", (9, 11)))).shape == (3, 11, 9)
    with pytest.raises(DataError, match=r"10 x 10 = 100 pixels.*at most 99"):
        process.open(Image("a.png", PIL.Image.new("RGB", (10, 10))))


class TestEvaluationWithoutItsOwnProcessor:
    def evaluation(self, train: Any) -> Any:
        return decode(ImageProcessorsConfig, {"train": train}).eval

    def test_what_augments_becomes_a_plain_resize_of_the_same_size(self) -> None:
        for name in ("image_train", "blip2_image_train"):
            train = {"name": name, "image_size": 96, "max_file_pixels": 5000, "horizontal_flip": True}
            assert self.evaluation(train) == ImageEvalConfig(image_size=96, max_file_pixels=5000)

    @pytest.mark.parametrize(
        "train",
        [
            {"name": "image_anyres", "image_size": 96, "max_tiles": 4, "thumbnail": False},
            {"name": "image_eval", "image_size": 96, "resize": "crop"},
        ],
    )
    def test_what_does_not_augment_is_used_with_the_same_options(self, train: dict[str, Any]) -> None:
        assert self.evaluation(train).model_dump() == decode(ImageProcessorsConfig, train).train.model_dump()
        assert self.evaluation(train).model_dump().items() >= train.items()


@pytest.mark.parametrize("size", [(20, 20), (31, 90), (5, 7), (300, 1)])
def test_resizing_is_pillows(size: tuple[int, int]) -> None:
    image = PIL.Image.fromarray(rng().integers(0, 256, (40, 60, 3), np.uint8))
    usual = to_tensor(image.resize(size, PIL.Image.Resampling.BICUBIC)).int()
    # Both round to whole levels after each of two passes: measured 2 levels at most, here on noise.
    assert (resized(to_tensor(image), *size).int() - usual).abs().max() <= 2
    part = to_tensor(image.crop((10, 5, 50, 30)).resize(size, PIL.Image.Resampling.BICUBIC)).int()
    assert (resized(to_tensor(image), *size, box=(10, 5, 50, 30)).int() - part).abs().max() <= 2


def test_to_tensor_puts_colours_first() -> None:
    assert to_tensor(PIL.Image.new("RGB", (3, 2), RED)).tolist() == [[[255] * 3] * 2, [[0] * 3] * 2, [[0] * 3] * 2]


def test_registered_names() -> None:
    assert registry.get_processor_class("image_train") is ImageTrain
    assert registry.get_processor_class("image_eval") is ImageEval
    assert registry.get_processor_class("image_anyres") is ImageAnyRes
