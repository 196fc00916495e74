"""Every frame's grey tells its number, so that a test sees which frames were read."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest

from lavis_ds.config.schema import VideoConfig
from lavis_ds.data import video, video_file
from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.errors import DataError

av = pytest.importorskip("av")

RATE, STEP = 10, 4
"""Frames a second; grey levels between neighbours, several times what compression loses."""


def write(
    path: Path,
    num_frames: int = 50,
    codec: str = "mpeg4",
    key_every: int = 12,
    size: tuple[int, int] = (32, 16),
    rotation: int = 0,
    times: Sequence[int] | None = None,
    **options: str,
) -> Video:
    """Writes a video; `times` are the frames' starts in 1/10 s, one after the other where left out."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            codec, rate=RATE, options={"g": str(key_every), "sc_threshold": "1000000000"} | options
        )
        stream.width, stream.height = size
        stream.bit_rate = 4_000_000
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, RATE)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, time in enumerate(times or range(num_frames)):
            pixels = np.full((size[1], size[0], 3), STEP * number % 256, np.uint8)
            pixels[0:4, 0:4] = 255  # the top left corner
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Video(str(path))


def numbers(pictures: Sequence[PIL.Image.Image]) -> list[int]:
    """Which frames they are; grey levels are off by at most 1 (measured), STEP / 2 would be too much."""
    return [round(float(np.asarray(picture)[8:, 8:].mean()) / STEP) for picture in pictures]


CONTAINERS: list[tuple[str, dict[str, Any]]] = [
    ("a.mp4", {}),
    ("a.mp4", {"codec": "libx264", "bf": "2"}),
    ("a.mkv", {"codec": "libx264", "bf": "2"}),
    ("a.webm", {"codec": "libvpx-vp9", "deadline": "realtime", "cpu-used": "8"}),
    ("a.avi", {}),
    ("a.avi", {"bf": "2"}),
    ("a.mkv", {"codec": "libx264", "bf": "3", "x264-params": "open-gop=1"}),
    ("a.ts", {"codec": "libx264", "bf": "2"}),
    ("a.h264", {"codec": "libx264", "bf": "0"}),
    ("a.mjpeg", {"codec": "mjpeg"}),
]
RAW = ("a.h264", "a.mjpeg")
"""Bare streams say nothing of their rate; FFmpeg takes 25 frames a second."""
NAMES = ["-".join([name, *options.values()]) for name, options in CONTAINERS]


# Which frames


def test_times_are_the_centres_of_equal_spans(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mp4")  # 5 s
    assert video.sample_times(clip, VideoConfig(num_frames=5)) == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert video.sample_times(clip, VideoConfig(fps=2)) == pytest.approx([0.25 + 0.5 * i for i in range(10)])
    assert video.sample_times(clip, VideoConfig(fps=2, max_frames=5)) == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5])
    assert video.sample_times(clip, VideoConfig(fps=0.1)) == pytest.approx([2.5])
    assert len(video.sample_times(clip, VideoConfig())) == 8


def test_a_short_video_gives_each_frame_once(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mp4", num_frames=3)
    assert numbers([picture for _, picture in video.frames(clip, VideoConfig(num_frames=8))]) == [0, 1, 2]


@pytest.mark.parametrize(("name", "options"), CONTAINERS, ids=NAMES)
def test_the_header_is_right_in_every_container(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    header = video_file.read_header(write(tmp_path / name, **options))
    rate = 25 if name in RAW else RATE
    assert header.duration_s == pytest.approx(50 / rate, abs=1e-3)
    assert header.num_frames == 50


@pytest.mark.parametrize(("name", "options"), CONTAINERS, ids=NAMES)
@pytest.mark.parametrize("count", [4, 7, 50])
def test_the_same_frames_by_seeking_and_by_decoding_all(
    tmp_path: Path, name: str, options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_file, "_SEEK_COSTS_S", 0.1)
    clip = write(tmp_path / name, **options)
    config = VideoConfig(num_frames=count, max_frames=50)
    times = video.sample_times(clip, config)
    expected = [int((index + 0.5) * 50 / count) for index in range(count)]
    assert numbers([picture for _, picture in video.frames(clip, config)]) == expected
    assert numbers(video_file._frames_at(clip, times, seek=False)) == expected


def test_seeking_decodes_a_part_of_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = write(tmp_path / "a.mp4", num_frames=600, key_every=10)
    decoded = []
    read = video_file._Player._read
    monkeypatch.setattr(video_file._Player, "_read", lambda player: decoded.append(1) or read(player))
    video.frames(clip, VideoConfig(num_frames=4))
    assert len(decoded) < 100  # 47 measured; all are 600


def test_variable_frame_rates_go_by_time_not_by_number(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mkv", times=[0, 1, 2, 3, 20, 39])  # the fifth frame stays for nearly two seconds
    seen = video.frames(clip, VideoConfig(num_frames=4))
    assert [time for time, _ in seen] == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert numbers([picture for _, picture in seen]) == [3, 3, 4, 4]


@pytest.mark.parametrize(("rotation", "corner"), [(0, (0, 0)), (90, (0, -1)), (180, (-1, -1)), (-90, (-1, 0))])
def test_frames_stand_upright(tmp_path: Path, rotation: int, corner: tuple[int, int]) -> None:
    clip = write(tmp_path / "a.mp4", rotation=rotation)
    ((_, picture),) = video.frames(clip, VideoConfig(num_frames=1))
    assert picture.size == video_file.upright_size(clip) == ((32, 16) if rotation % 180 == 0 else (16, 32))
    x, y = (index % size for index, size in zip(corner, picture.size, strict=True))
    assert np.asarray(picture)[y, x].min() > 200


def test_bytes_are_read_like_a_file(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mp4")
    stored = Video("shard.tar: 1.mp4", Path(clip.path).read_bytes())
    config = VideoConfig(num_frames=3)
    assert [p.tobytes() for _, p in video.frames(stored, config)] == [
        p.tobytes() for _, p in video.frames(clip, config)
    ]


# Folders of frames


@pytest.fixture
def frame_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(12):
        PIL.Image.new("RGB", (16, 16), (STEP * number,) * 3).save(folder / f"f{number}.png")
    (folder / "notes.txt").write_text("no frame")
    return folder


def test_frames_of_a_folder_are_in_natural_order_a_second_each(frame_folder: Path) -> None:
    folder = Video(str(frame_folder))
    seen = video.frames(folder, VideoConfig(num_frames=4))
    assert [time for time, _ in seen] == pytest.approx([1.5, 4.5, 7.5, 10.5])
    assert numbers([picture for _, picture in seen]) == [1, 4, 7, 10]
    assert numbers([picture for _, picture in video.frames(folder, VideoConfig(fps=1))]) == list(range(12))


# Conversations


def test_frames_take_the_video_s_place(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mp4")
    talk = Conversation(
        "c", (Turn("user", (Text("Look: "), clip, Text("What?")), 0.5), Turn("assistant", (Text("x"),)))
    )
    shown = video.expand(talk, VideoConfig(num_frames=2, timestamps=True))
    look, first, one, second, two, what = shown.turns[0].content
    assert (look, first, second, what) == (Text("Look: "), Text("<1.2 s>"), Text("<3.8 s>"), Text("What?"))
    assert isinstance(one, Image)
    assert isinstance(two, Image)
    assert [one.path, two.path] == [f"{clip.path} at 1.25 s", f"{clip.path} at 3.75 s"]
    assert numbers([one.data, two.data]) == [12, 37]  # type: ignore[list-item]
    assert (shown.turns[0].weight, shown.turns[1], shown.id) == (0.5, talk.turns[1], "c")


@pytest.mark.parametrize("rotation", [0, 90])
def test_without_pixels_all_but_the_pixels_is_the_same(
    tmp_path: Path, rotation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation("c", (Turn("user", (write(tmp_path / "a.mp4", rotation=rotation),)),))
    config = VideoConfig(fps=1, timestamps=True)
    full = video.expand(talk, config)
    monkeypatch.setattr(video_file, "frames_at", lambda *_: pytest.fail("frames were decoded"))
    monkeypatch.setattr(video, "frames_at", lambda *_: pytest.fail("frames were decoded"))
    counted = video.expand(talk, config, pixels=False)

    def shape(part: Any) -> Any:
        return (part.path, part.data.size) if isinstance(part, Image) else part

    assert [shape(part) for part in counted.turns[0].content] == [shape(part) for part in full.turns[0].content]
    assert len(counted.images) == 5


def test_frames_of_a_folder_stay_files(frame_folder: Path) -> None:
    talk = Conversation("c", (Turn("user", (Video(str(frame_folder)),)),))
    for pixels in (True, False):
        shown = video.expand(talk, VideoConfig(num_frames=2), pixels=pixels)
        assert shown.images == (Image(str(frame_folder / "f3.png")), Image(str(frame_folder / "f9.png")))


def test_a_conversation_without_videos_stays_as_it_is() -> None:
    talk = Conversation("c", (Turn("user", (Image("/1.png"), Text("x"))),))
    assert video.expand(talk, VideoConfig()) is talk


# Faults


def cut(source: Path, part: float) -> None:
    data = source.read_bytes()
    source.write_bytes(data[: int(len(data) * part)])


def _sound(path: Path) -> None:
    with av.open(str(path), "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, "there is no such video"),
    (lambda path: path.touch(), "the video file is empty"),
    (lambda path: path.write_bytes(b"not a video at all" * 100), "the video can't be read: InvalidDataError"),
    (lambda path: path.mkdir(), "the folder holds no frames"),
    (lambda path: (write(path), cut(path, 0.5)), "can't be read|no video that can be decoded"),
    (lambda path: (write(path, num_frames=100, movflags="faststart"), cut(path, 0.5)), "can't be read|ends after"),
    (_sound, "no video that can be decoded"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_videos_are_named(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "bad.mp4"
    make(path)
    with pytest.raises(DataError, match=message) as caught:
        video.frames(Video(str(path)), VideoConfig())
    assert str(caught.value).startswith(f"{path}: ")


def test_a_video_cut_off_is_not_filled_up_with_its_last_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    clip = write(path, num_frames=60)
    cut(path, 0.6)
    with pytest.raises(DataError, match=r"a\.mkv: .*(ends after|can't be read)"):
        video.frames(clip, VideoConfig())


def test_reading_again_and_again_keeps_neither_files_nor_memory(tmp_path: Path) -> None:
    clip = write(tmp_path / "a.mp4", size=(320, 240))
    broken = write(tmp_path / "b.mkv", num_frames=60)
    cut(tmp_path / "b.mkv", 0.6)
    process = psutil.Process()

    def read(times: int) -> tuple[int, int]:
        for _ in range(times):
            video.frames(clip, VideoConfig(num_frames=4))
            with pytest.raises(DataError):
                video.frames(broken, VideoConfig(num_frames=4))
        gc.collect()
        return len(os.listdir("/proc/self/fd")), process.memory_info().rss

    files, memory = read(20)
    files_after, memory_after = read(60)
    assert files_after == files
    assert memory_after - memory < 8 * 2**20  # 0.5 MiB measured; frames kept would be 55 MiB
