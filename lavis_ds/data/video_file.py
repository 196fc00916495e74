"""Video files, read with PyAV: what their header says, and the frames that are on screen at given times.

A frame is looked for from the last key frame before it, so that a few frames of a long video cost little. Where a
container can't be sought in exactly, the video is decoded from its start: the frames are the same either way.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import PIL.Image

from lavis_ds.data.conversation import Video
from lavis_ds.errors import ConfigError, DataError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

_TURNS = {
    1: PIL.Image.Transpose.ROTATE_90,
    2: PIL.Image.Transpose.ROTATE_180,
    3: PIL.Image.Transpose.ROTATE_270,
}
"""Quarter turns counter-clockwise."""
_SEEK_COSTS_S = 1.0
"""Seconds of video that are decoded in about the time that a seek takes."""
_SEEK_EARLIER_S = (0, 1, 5)
_EARLY_END_S = 0.5
"""What a header may overstate the duration by."""


@dataclass(frozen=True)
class Header:
    """What a video file says of itself.

    Attributes:
        duration_s: seconds from the first frame's start to the last one's end.
        num_frames: exact, or, where the header does not say, from the average rate.
    """

    duration_s: float
    num_frames: int


def read_header(video: Video) -> Header:
    """Duration and number of frames. Nothing is decoded; containers without a duration are read once to find it.

    Raises:
        DataError: the file is missing, empty, damaged, or no video.
    """
    with _opened(video) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        duration_s = _stated_duration_s(container, stream) or _found_duration_s(container, stream)
        num_frames = stream.frames or round(duration_s * float(rate or 0))
        if duration_s <= 0 or num_frames == 0:
            raise DataError("the video holds no frames.", where=video.path)
        return Header(duration_s, num_frames)


def upright_size(video: Video) -> tuple[int, int]:
    """Width and height of the frames as they are shown. One frame is decoded, for only it says how it is turned.

    Raises:
        DataError: the file is missing, empty, damaged, or no video.
    """
    with _opened(video) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None:
            raise DataError("the video holds no frames.", where=video.path)
        size = frame.width, frame.height
        return size if _quarter_turns(frame) % 2 == 0 else size[::-1]


def frames_at(video: Video, times_s: Sequence[float]) -> list[PIL.Image.Image]:
    """The frames on screen at ascending times from the first frame: RGB, upright.

    Raises:
        DataError: the file is missing, empty, damaged, no video, or ends early.
    """
    try:
        return _frames_at(video, times_s, seek=True)
    except _InexactSeekError:
        return _frames_at(video, times_s, seek=False)


def _frames_at(video: Video, times_s: Sequence[float], *, seek: bool) -> list[PIL.Image.Image]:
    with _opened(video) as (container, stream):
        player = _Player(container, stream, seek)
        return [_upright(player.shown_at(time_s, video.path)) for time_s in times_s]


class _InexactSeekError(Exception):
    """The container did not go to a key frame before the time that was asked for."""


class _Player:
    """Decodes forward, and jumps ahead where that is cheaper."""

    def __init__(self, container: InputContainer, stream: VideoStream, seek: bool) -> None:
        self._container, self._stream, self._may_seek = container, stream, seek
        self._rate = float(stream.average_rate or stream.guessed_rate or 1)
        self._unit_s, self._start = float(stream.time_base or 1), 0
        self._key_interval_s = _SEEK_COSTS_S
        self._decoded, self._number = container.decode(stream), -1
        self._shown: tuple[float, VideoFrame] | None = None
        self._next = self._read()

    def shown_at(self, time_s: float, path: str) -> VideoFrame:
        """The last frame that starts at `time_s` or before; the first one where none does."""
        if self._may_seek and time_s - (self._shown[0] if self._shown else 0) > self._key_interval_s:
            self._seek(time_s)
        while self._next is not None and (self._shown is None or self._next[0] <= time_s + 1e-6):
            self._shown, self._next = self._next, self._read()
        if self._shown is None:
            raise DataError("the video holds no frames.", where=path)
        start_s, frame = self._shown
        if self._next is None and time_s > start_s + self._length_s(frame) + _EARLY_END_S:
            raise DataError(
                f"the video ends after {start_s + self._length_s(frame):.2f} s.",
                where=path,
                expected=f"a frame at {time_s:.2f} s, for its header says that it is longer",
                hint="The file may be cut off. Replace it, or leave the sample out.",
            )
        if frame.is_corrupt:
            raise DataError(f"the video's frame at {time_s:.2f} s is damaged.", where=path)
        return frame

    def _seek(self, time_s: float) -> None:
        """Go to a key frame that starts at `time_s` or before.

        Containers seek by decoding time or by file position, and so may end up after a key frame's own start; from a
        little earlier they go to the one before it.
        """
        for earlier_s in _SEEK_EARLIER_S:
            target_s = max(0, time_s - earlier_s)
            try:
                self._container.seek(int(target_s / self._unit_s) + self._start, stream=self._stream)
            except _av().FFmpegError as error:
                raise _InexactSeekError from error
            self._decoded = self._container.decode(self._stream)
            self._shown, self._next = None, self._read()
            if self._next is not None and self._next[1].key_frame and self._next[0] <= time_s:
                self._key_interval_s = max(self._key_interval_s, time_s - self._next[0])
                return
        raise _InexactSeekError

    def _read(self) -> tuple[float, VideoFrame] | None:
        """Time and content of the next frame. Bare streams without times go on at their frame rate."""
        frame = next(self._decoded, None)
        if frame is None:
            return None
        self._number += 1
        if self._number == 0:
            self._start = frame.pts or 0  # the stream's own start time is one of decoding in some containers
        if frame.pts is not None:
            return (frame.pts - self._start) * self._unit_s, frame
        if self._may_seek:
            raise _InexactSeekError
        return self._number / self._rate, frame

    def _length_s(self, frame: VideoFrame) -> float:
        return frame.duration * self._unit_s or 1 / self._rate


@contextmanager
def _opened(video: Video) -> Iterator[tuple[InputContainer, VideoStream]]:
    av = _av()
    if video.data is None and not os.path.isfile(video.path):
        raise DataError(
            "there is no such video file or folder of frames.",
            where=video.path,
            hint="Check `image_root` and the annotations.",
        )
    if (os.path.getsize(video.path) if video.data is None else len(video.data)) == 0:
        raise DataError("the video file is empty.", where=video.path)
    source = video.path if video.data is None else io.BytesIO(video.data)
    try:
        with av.open(source) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise DataError("the file has no video that can be decoded.", where=video.path)
            stream.codec_context.thread_count = 1  # data-loading processes share the cores already
            yield container, stream
    except av.FFmpegError as error:
        raise DataError(
            f"the video can't be read: {type(error).__name__}: {error.strerror}.",
            where=video.path,
            hint="Replace the file, or leave the sample out.",
        ) from error


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ConfigError(
            "videos need the package av.", hint="Run `pip install 'lavis-ds[video]'`, or use folders of frames."
        ) from None
    return av


def _stated_duration_s(container: InputContainer, stream: VideoStream) -> float:
    """What the header says of this stream; 0 where it says nothing. Other streams, such as sound, may be longer."""
    if stream.duration:
        return float(stream.duration * (stream.time_base or 0))
    hours, _, rest = stream.metadata.get("DURATION", "").partition(":")  # Matroska and WebM: 00:01:02.500000000
    minutes, _, seconds = rest.partition(":")
    if hours and minutes and seconds:
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if container.duration and len(container.streams) == 1:
        return container.duration / 1_000_000
    return 0


def _found_duration_s(container: InputContainer, stream: VideoStream) -> float:
    packets = [(packet.pts, packet.duration or 0) for packet in container.demux(stream) if packet.size]
    ends = [pts + duration for pts, duration in packets if pts is not None]
    if ends:
        return float((max(ends) - (stream.start_time or 0)) * (stream.time_base or 0))
    return len(packets) / float(stream.average_rate or stream.guessed_rate or 1)


def _quarter_turns(frame: VideoFrame) -> int:
    return round(frame.rotation / 90) % 4


def _upright(frame: VideoFrame) -> PIL.Image.Image:
    decoded: Any = frame  # `to_image` has no types
    image: PIL.Image.Image = decoded.to_image()
    turn = _TURNS.get(_quarter_turns(frame))
    return image if turn is None else image.transpose(turn)
