from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import pytest
import torch

from lavis_ds.data.conversation import Image
from lavis_ds.data.processors import open_image as module
from lavis_ds.data.processors.open_image import MAX_PIXELS, image_size, open_image, open_pixels, to_tensor
from lavis_ds.errors import DataError

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(image: PIL.Image.Image, path: Path, **options: Any) -> str:
    image.save(path, **options)
    return str(path)


def opened(path: str) -> PIL.Image.Image:
    return open_image(Image(path))


def gradient(width: int, height: int) -> PIL.Image.Image:
    """Red grows to the right, green downward."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return PIL.Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8))


def png_header(width: int, height: int) -> bytes:
    """A PNG of this size that holds no pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"")]
    made = [struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc32(kind + body)) for kind, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def test_rgb_keeps_its_pixels(tmp_path: Path) -> None:
    image = gradient(5, 4)
    picture = opened(saved(image, tmp_path / "a.png"))
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture), np.asarray(image))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(tmp_path: Path, mode: str) -> None:
    image = PIL.Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    picture = opened(saved(image.convert(mode), tmp_path / "a.png"))
    assert [picture.getpixel((x, 0)) for x in range(2)] == [WHITE, (0, 0, 0)]


def test_palette_with_and_without_transparency(tmp_path: Path) -> None:
    image = PIL.Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 0, 255])
    image.putpixel((1, 0), 1)
    opaque = opened(saved(image, tmp_path / "a.png"))
    assert [opaque.getpixel((x, 0)) for x in range(2)] == [RED, (0, 0, 255)]
    transparent = opened(saved(image, tmp_path / "b.png", transparency=1))
    assert [transparent.getpixel((x, 0)) for x in range(2)] == [RED, WHITE]


def test_transparent_colour_of_an_rgb_png(tmp_path: Path) -> None:
    image = PIL.Image.new("RGB", (1, 1), RED)
    assert opened(saved(image, tmp_path / "a.png", transparency=RED)).getpixel((0, 0)) == WHITE


def test_cmyk(tmp_path: Path) -> None:
    path = saved(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "a.jpg", quality=100)
    # JPEG moves the pixels by up to 1 here.
    assert np.abs(np.asarray(opened(path)).astype(int) - RED).max() <= 3


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path: Path, dtype: Any) -> None:
    pixels = np.array([[0, 257, 32896, 65535]], dtype)
    path = saved(PIL.Image.fromarray(pixels), tmp_path / ("a.png" if dtype is np.uint16 else "a.tif"))
    assert np.asarray(opened(path))[0].tolist() == [[v] * 3 for v in (0, 1, 128, 255)]


def test_grey_and_bilevel(tmp_path: Path) -> None:
    assert opened(saved(PIL.Image.new("L", (1, 1), 77), tmp_path / "a.png")).getpixel((0, 0)) == (77,) * 3
    assert opened(saved(PIL.Image.new("1", (1, 1), 1), tmp_path / "b.png")).getpixel((0, 0)) == WHITE


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = gradient(40, 20)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    picture = opened(saved(image, tmp_path / "a.png", exif=exif))
    assert picture.size == (20, 40)
    assert np.array_equal(np.asarray(picture), np.asarray(image.transpose(PIL.Image.Transpose.ROTATE_270)))


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in (RED, (0, 0, 255))]
    path = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert opened(path).getpixel((0, 0)) == RED


def test_unusable_files_are_named(tmp_path: Path) -> None:
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
            opened(str(tmp_path / name))
        assert message.lower() in str(caught.value).lower(), name
        assert str(caught.value).startswith(f"{tmp_path / name}: ")


class TestSources:
    image = gradient(7, 5)

    def sources(self, tmp_path: Path) -> list[Image]:
        data = encoded(self.image)
        (tmp_path / "a.png").write_bytes(data)
        return [
            Image(str(tmp_path / "a.png")),
            Image("data:image/png;base64," + base64.b64encode(data).decode()),
            Image("shard.tar: 0001.png", data),
            Image("row 7", self.image),
        ]

    def test_all_give_the_same_pixels_and_size(self, tmp_path: Path) -> None:
        for source in self.sources(tmp_path):
            assert np.array_equal(np.asarray(open_image(source)), np.asarray(self.image))
            assert image_size(source) == (7, 5)

    def test_decoded_pixels_stay_usable_after_they_were_opened(self) -> None:
        pixels = PIL.Image.open(io.BytesIO(encoded(self.image)))
        source = Image("row 7", pixels)
        first, second = open_image(source), open_image(source)
        assert np.array_equal(np.asarray(first), np.asarray(second))

    def test_errors_name_the_source_in_short(self) -> None:
        long_url = "data:image/png;base64," + "A" * 100_000
        for source, message in [
            (Image("shard.tar: 0001.png", b"GIF?"), "shard.tar: 0001.png: the image can't be read"),
            (Image(long_url), "(100,022 characters): the image can't be read: UnidentifiedImageError"),
            (Image("data:image/png;base64,A*A="), "its base64 is damaged"),
            (Image("data:text/plain,hello"), "not with data:image/...;base64,"),
        ]:
            for read in (open_image, image_size):
                with pytest.raises(DataError) as caught:
                    read(source)
                assert message in str(caught.value)
                assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation(kind: str, orientation: int) -> None:
    image = gradient(64, 32)
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    source = Image("a", encoded(image, kind, exif=exif))
    picture = open_image(source)
    assert image_size(source) == picture.size == ((32, 64) if orientation >= 5 else (64, 32))
    x, y = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    # The dark corner goes where the orientation says. JPEG moves it by up to 15 here.
    corner = picture.getpixel((x * (picture.width - 1), y * (picture.height - 1)))
    assert isinstance(corner, tuple)
    assert max(corner[:2]) <= 15


class TestTooManyPixels:
    def test_the_limit_is_pillows_own(self) -> None:
        assert MAX_PIXELS == PIL.Image.MAX_IMAGE_PIXELS

    def test_refused_from_the_header_alone(self) -> None:
        for read in (open_image, image_size):
            with pytest.raises(DataError, match="9500 x 9500 = 90,250,000 pixels"):
                read(Image("bomb.png", png_header(9500, 9500)))
            assert image_size(Image("large.png", png_header(9500, 9500)), max_pixels=10**8) == (9500, 9500)
            with pytest.raises(DataError, match=r"bomb\.png: the image is too large"):  # beyond what Pillow lets pass
                read(Image("bomb.png", png_header(20_000, 20_000)), max_pixels=10**9)

    def test_a_limit_of_ones_own(self) -> None:
        for data in (gradient(30, 30), encoded(gradient(30, 30))):
            assert image_size(Image("a", data), max_pixels=900) == (30, 30)
            for read in (open_image, image_size):
                with pytest.raises(DataError, match="at most 899"):
                    read(Image("a", data), max_pixels=899)


class TestMinSize:
    def size(self, data: bytes, wanted: tuple[int, int] | None) -> tuple[int, int]:
        return open_image(Image("a", data), min_size=lambda width, height: wanted).size

    def test_jpegs_are_decoded_at_a_fraction_but_no_smaller(self) -> None:
        data = encoded(gradient(641, 480), "JPEG")
        for wanted, size in [
            (None, (641, 480)),
            ((400, 100), (641, 480)),
            ((320, 240), (321, 240)),
            ((160, 121), (321, 240)),
            ((80, 60), (81, 60)),
            ((1, 1), (81, 60)),
        ]:
            assert self.size(data, wanted) == size

    def test_sizes_are_those_of_the_upright_picture(self) -> None:
        exif = PIL.Image.Exif()
        exif[0x0112] = 6
        data = encoded(gradient(640, 160), "JPEG", exif=exif)
        seen = []
        picture = open_image(Image("a", data), min_size=lambda *size: seen.append(size) or (80, 320))  # type: ignore[func-returns-value]
        assert seen == [(160, 640)]
        assert picture.size == (80, 320)

    def test_other_formats_are_decoded_whole(self) -> None:
        assert self.size(encoded(gradient(64, 48)), (8, 8)) == (64, 48)


class TestPixels:
    """`open_pixels` gives what `open_image` gives, though simplejpeg decodes most JPEGs."""

    def check(self, data: bytes, **options: Any) -> None:
        image = Image("a", data)
        assert torch.equal(open_pixels(image, **options), to_tensor(open_image(image, **options)))

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_jpegs(self, orientation: int) -> None:
        pytest.importorskip("simplejpeg")
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        for mode in ("RGB", "L", "CMYK"):
            data = encoded(gradient(64, 48).convert(mode), "JPEG", exif=exif)
            self.check(data)
            self.check(data, min_size=lambda width, height: (16, 16))
        self.check(encoded(gradient(64, 48), "JPEG", subsampling=0, progressive=True, exif=exif))

    def test_other_formats(self) -> None:
        for mode in ("RGB", "RGBA", "P", "L", "1"):
            self.check(encoded(gradient(9, 7).convert(mode)))
        pixels = gradient(9, 7)
        assert torch.equal(open_pixels(Image("a", pixels)), to_tensor(pixels))

    def test_pillow_decodes_what_simplejpeg_can_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encoded(gradient(64, 48), "JPEG")
        calls = []

        class Failing:
            decode_jpeg_header = staticmethod(module.simplejpeg.decode_jpeg_header)

            def decode_jpeg(self, *_: Any, **options: int) -> Any:
                calls.append(options)
                raise ValueError("no such thing")

        monkeypatch.setattr(module, "simplejpeg", Failing())
        self.check(data)
        self.check(data, min_size=lambda width, height: (32, 24))
        assert calls == [{}, {}, *2 * [{"min_width": 32, "min_height": 24}]]  # as a usual JPEG, then with Pillow's help
        monkeypatch.setattr(module, "simplejpeg", None)
        self.check(data)

    def test_damaged_files_are_refused_alike(self, tmp_path: Path) -> None:
        data = encoded(gradient(64, 48), "JPEG")
        for image in (Image("cut.jpg", data[: len(data) // 2]), Image(str(tmp_path / "none.jpg"))):
            messages = []
            for read in (open_image, open_pixels):
                with pytest.raises(DataError) as caught:
                    read(image)
                messages.append(str(caught.value))
            assert messages[0] == messages[1]
        with pytest.raises(DataError, match="too large"):
            open_pixels(Image("a", data), max_pixels=64 * 48 - 1)


def test_the_size_of_a_png_is_read_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("decoded")

    data = encoded(gradient(9, 4))
    monkeypatch.setattr(PIL.PngImagePlugin.PngImageFile, "load", fail)
    assert image_size(Image("a", data)) == (9, 4)


def test_a_picture_of_one_pixel() -> None:
    assert open_image(Image("a", encoded(PIL.Image.new("L", (1, 1), 9)))).getpixel((0, 0)) == (9, 9, 9)
