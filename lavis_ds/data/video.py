"""Which frames of a video a model sees, and how they are read."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import PIL.Image

from lavis_ds.config.schema import VideoConfig
from lavis_ds.data.conversation import Content, Conversation, Image, Text, Video
from lavis_ds.data.processors.open_image import open_image
from lavis_ds.data.video_file import frames_at, read_header, upright_size
from lavis_ds.data.video_folder import frame_files

DEFAULT_NUM_FRAMES = 8
"""Frames of a video where neither `num_frames` nor `fps` is set."""


def sample_times(video: Video, config: VideoConfig) -> list[float]:
    """Times, in seconds from the first frame, that frames are taken at: the centres of spans of equal length.

    Only the header is read. A video of fewer frames than asked for gives each once. Frames of a folder follow each
    other by one second.

    Raises:
        DataError: the video is missing, empty or damaged.
    """
    if _is_folder(video):
        count = len(frame_files(video.path))
        return _times(float(count), count, config)
    header = read_header(video)
    return _times(header.duration_s, header.num_frames, config)


def frames(video: Video, config: VideoConfig) -> list[tuple[float, PIL.Image.Image]]:
    """Each of `sample_times` with the frame on screen at that time: RGB, upright.

    Raises:
        DataError: the video is missing, empty or damaged, or ends before its header says it does.
    """
    times = sample_times(video, config)
    if _is_folder(video):
        files = frame_files(video.path)
        return [(time, open_image(Image(files[int(time)]))) for time in times]
    return list(zip(times, frames_at(video, times), strict=True))


def expand(conversation: Conversation, config: VideoConfig, *, pixels: bool = True) -> Conversation:
    """The conversation with each video's frames in its place, each after its time where `config.timestamps` is set.

    Args:
        conversation: with or without videos.
        config: which frames.
        pixels: decode the frames; else pictures of the same size, all black, stand for them, as counting tokens needs.

    Raises:
        DataError: a video is missing, empty or damaged.
    """
    if not any(isinstance(part, Video) for turn in conversation.turns for part in turn.content):
        return conversation
    turns = []
    for turn in conversation.turns:
        content: list[Content] = []
        for part in turn.content:
            content += _frame_parts(part, config, pixels) if isinstance(part, Video) else [part]
        turns.append(replace(turn, content=tuple(content)))
    return replace(conversation, turns=tuple(turns))


def _frame_parts(video: Video, config: VideoConfig, pixels: bool) -> list[Content]:
    parts: list[Content] = []
    for time, image in frame_images(video, config, pixels=pixels):
        parts += [Text(f"<{time:.1f} s>"), image] if config.timestamps else [image]
    return parts


def frame_images(video: Video, config: VideoConfig, *, pixels: bool = True) -> list[tuple[float, Image]]:
    """Each of `sample_times` with its frame. Those of a folder are pictures as any other, opened when they are needed.

    Args:
        video: a file or a folder of frames.
        config: which frames.
        pixels: see `expand`.

    Raises:
        DataError: the video is missing, empty or damaged.
    """
    if _is_folder(video):
        files = frame_files(video.path)
        return [(time, Image(files[int(time)])) for time in sample_times(video, config)]
    if pixels:
        found = frames(video, config)
    else:
        blank = PIL.Image.new("L", upright_size(video))
        found = [(time, blank) for time in sample_times(video, config)]
    return [(time, Image(f"{video.path} at {time:.2f} s", data)) for time, data in found]


def _is_folder(video: Video) -> bool:
    return video.data is None and os.path.isdir(video.path)


def _times(duration_s: float, num_frames: int, config: VideoConfig) -> list[float]:
    most = min(config.max_frames, num_frames)
    count = config.num_frames or DEFAULT_NUM_FRAMES
    if config.fps is not None:
        count = math.ceil(duration_s * config.fps - 0.5)
        if 1 <= count <= most:
            return [(index + 0.5) / config.fps for index in range(count)]
    count = max(1, min(count, most))
    return [(index + 0.5) * duration_s / count for index in range(count)]
