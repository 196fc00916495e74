from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.data.conversation import Image, Video
from lavis_ds.data.formats.media import image_of, images_of, video_of, videos_of
from lavis_ds.errors import DataError

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a/1.jpg", Image("/data/a/1.jpg")),
        ("/a/1.jpg", Image("/a/1.jpg")),
        ("file:///a/b%20c.jpg", Image("/a/b c.jpg")),
        (PIXEL, Image(PIXEL)),
        ({"bytes": b"abc", "path": "1.jpg"}, Image("f: item 1: 1.jpg", b"abc")),
        ({"bytes": b"abc", "path": None}, Image("f: item 1: image", b"abc")),
        ({"bytes": None, "path": "1.jpg"}, Image("/data/1.jpg")),
    ],
)
def test_pictures_may_lie_in_many_places(value: Any, expected: Image) -> None:
    assert image_of(value, "image", "f: item 1", "/data") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1.mp4", Video("/data/1.mp4")),
        ({"bytes": b"abc", "path": "1.mp4"}, Video("f: 1.mp4", b"abc")),
        ({"bytes": None, "path": "1.mp4"}, Video("/data/1.mp4")),
    ],
)
def test_videos_too(value: Any, expected: Video) -> None:
    assert video_of(value, "video", "f", "/data") == expected


def test_none_one_and_several() -> None:
    assert images_of({}, "image", "f", None) == images_of({"image": ""}, "image", "f", None) == []
    assert images_of({"image": None}, "image", "f", None) == []
    assert images_of({"image": "/1"}, "image", "f", None) == [Image("/1")]
    assert videos_of({"video": ["/1", "/2"]}, "video", "f", None) == [Video("/1"), Video("/2")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://a.org/1.jpg", r"nothing is downloaded while training\. Given: 'https://a\.org/1\.jpg'.*Download it"),
        ("s3://bucket/1.jpg", "nothing is downloaded"),
        ("data:image/png;base64,", "no data URL of a picture"),
        ("data:image/png,abc", "no data URL of a picture"),
        ("data:text/plain;base64,abcd", "no data URL of a picture"),
        ("data:image/png;base64,ab cd", "no data URL of a picture"),
        (7, "`image` is not text"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"bytes": b""}, "neither bytes nor a path"),
        ({"url": "x"}, "neither bytes nor a path"),
        ("", "empty path"),
    ],
)
def test_bad_places_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        image_of(value, "image", "f: item 1", "/data")
    assert str(caught.value).startswith("f: item 1: ")


def test_a_relative_path_needs_a_root() -> None:
    with pytest.raises(DataError, match="image_root"):
        image_of("1.jpg", "image", "f", None)
    with pytest.raises(DataError, match="nothing is downloaded"):
        video_of(PIXEL, "video", "f", "/data")
