from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.data.configs import ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.processors.image import ImageEval, ImageTrain, open_image, to_tensor
from lavis_ds.errors import ConfigError, DataError

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image: PIL.Image.Image, path: Path, **options: Any) -> str:
    image.save(path, **options)
    return str(path)


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Red grows to the right, green downward."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return PIL.Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestOpenImage:
    def test_rgb_keeps_its_pixels(self, tmp_path: Path) -> None:
        image = gradient(5, 4)
        opened = open_image(saved(image, tmp_path / "a.png"))
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened), np.asarray(image))

    @pytest.mark.parametrize("mode", ["RGBA", "LA"])
    def test_transparency_shows_white(self, tmp_path: Path, mode: str) -> None:
        image = PIL.Image.new("RGBA", (2, 1), (0, 0, 0, 0))
        image.putpixel((1, 0), (0, 0, 0, 255))
        opened = open_image(saved(image.convert(mode), tmp_path / "a.png"))
        assert [opened.getpixel((x, 0)) for x in range(2)] == [WHITE, (0, 0, 0)]

    def test_palette_with_and_without_transparency(self, tmp_path: Path) -> None:
        image = PIL.Image.new("P", (2, 1))
        image.putpalette([*RED, 0, 0, 255])
        image.putpixel((1, 0), 1)
        opaque = open_image(saved(image, tmp_path / "a.png"))
        assert [opaque.getpixel((x, 0)) for x in range(2)] == [RED, (0, 0, 255)]
        transparent = open_image(saved(image, tmp_path / "b.png", transparency=1))
        assert [transparent.getpixel((x, 0)) for x in range(2)] == [RED, WHITE]

    def test_transparent_colour_of_an_rgb_png(self, tmp_path: Path) -> None:
        image = PIL.Image.new("RGB", (1, 1), RED)
        assert open_image(saved(image, tmp_path / "a.png", transparency=RED)).getpixel((0, 0)) == WHITE

    def test_cmyk(self, tmp_path: Path) -> None:
        path = saved(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "a.jpg", quality=100)
        # JPEG moves the pixels by up to 1 here.
        assert np.abs(np.asarray(open_image(path)).astype(int) - RED).max() <= 3

    @pytest.mark.parametrize("dtype", [np.uint16, np.int32])
    def test_16_bit_grey_is_scaled_and_not_clipped(self, tmp_path: Path, dtype: Any) -> None:
        pixels = np.array([[0, 257, 32896, 65535]], dtype)
        path = saved(PIL.Image.fromarray(pixels), tmp_path / ("a.png" if dtype is np.uint16 else "a.tif"))
        assert np.asarray(open_image(path))[0].tolist() == [[v] * 3 for v in (0, 1, 128, 255)]

    def test_grey_and_bilevel(self, tmp_path: Path) -> None:
        assert open_image(saved(PIL.Image.new("L", (1, 1), 77), tmp_path / "a.png")).getpixel((0, 0)) == (77,) * 3
        assert open_image(saved(PIL.Image.new("1", (1, 1), 1), tmp_path / "b.png")).getpixel((0, 0)) == WHITE

    def test_exif_orientation_is_applied(self, tmp_path: Path) -> None:
        image = gradient(40, 20)
        exif = PIL.Image.Exif()
        exif[0x0112] = 6  # turn by 90 degrees clockwise to view
        opened = open_image(saved(image, tmp_path / "a.png", exif=exif))
        assert opened.size == (20, 40)
        assert np.array_equal(np.asarray(opened), np.asarray(image.transpose(PIL.Image.Transpose.ROTATE_270)))

    def test_first_frame_of_an_animation(self, tmp_path: Path) -> None:
        frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in (RED, (0, 0, 255))]
        path = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
        assert open_image(path).getpixel((0, 0)) == RED

    def test_unusable_files_are_named(self, tmp_path: Path) -> None:
        whole = Path(saved(gradient(64, 64), tmp_path / "a.jpg")).read_bytes()
        (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "text.png").write_text("<html>404</html>")
        (tmp_path / "empty.png").write_bytes(b"")
        saved(PIL.Image.fromarray(np.ones((2, 2), np.float32)), tmp_path / "float.tif")
        saved(PIL.Image.fromarray(np.full((2, 2), 70000, np.int32)), tmp_path / "wide.tif")
        for name, message in [
            ("cut.jpg", "truncated"),
            ("text.png", "can't be read: UnidentifiedImageError"),
            ("empty.png", "can't be read: UnidentifiedImageError"),
            ("float.tif", "32-bit float"),
            ("wide.tif", "70000"),
            ("missing.png", "there is no such image file"),
            (".", "can't be read: IsADirectoryError"),
        ]:
            with pytest.raises(DataError) as caught:
                open_image(str(tmp_path / name))
            assert message.lower() in str(caught.value).lower(), name
            assert str(caught.value).startswith(f"{tmp_path / name}: ")

    @pytest.mark.parametrize("side", [30, 50])  # Pillow warns from 1 x its limit on and refuses from 2 x on
    def test_decompression_bombs_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int) -> None:
        path = saved(gradient(side, side), tmp_path / "a.png")
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 800)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(DataError, match="too large"):
                open_image(path)


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
        assert self.make(min_scale=0.9)._crop(1000, 10, rng()) == pytest.approx((493.333, 0, 506.667, 10), abs=1e-3)

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


def test_to_tensor_puts_colours_first() -> None:
    assert to_tensor(PIL.Image.new("RGB", (3, 2), RED)).tolist() == [[[255] * 3] * 2, [[0] * 3] * 2, [[0] * 3] * 2]


def test_registered_names() -> None:
    assert registry.get_processor_class("image_train") is ImageTrain
    assert registry.get_processor_class("image_eval") is ImageEval
