"""Videos of native resolution: patches, positions, and what stands for them in a sample."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from lavis_ds.batch import Sample
from lavis_ds.config.schema import VideoConfig
from lavis_ds.data.configs import ChatConfig, ImageEvalConfig, ImageNativeConfig, PlainConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn, Video
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.base import ImageProcessor, TextContext
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageEval
from lavis_ds.data.processors.mrope import boxes, mrope_positions
from lavis_ds.data.processors.native import ImageNative, unpatched
from lavis_ds.data.processors.plain import Plain
from lavis_ds.data.processors.tokens import Tokens
from lavis_ds.data.processors.views import Views, seconds_a_step, step_times
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.errors import ConfigError, SampleError
from tests.unit.data.test_video import write

MARKS = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
KEY = SampleKey(0, 0, 0, 0)


def native(**options: Any) -> ImageNative:
    return ImageNative(ImageNativeConfig(**{"video_min_pixels": 1, **options}))


def frames(count: int, width: int, height: int) -> list[tuple[float, Image]]:
    """Smooth pictures, half a second each."""
    rng = np.random.default_rng(count)
    small = [PIL.Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)) for _ in range(count)]
    whole = [picture.resize((width, height), PIL.Image.Resampling.BICUBIC) for picture in small]
    return [(0.5 * number + 0.25, Image(f"frame {number}", picture)) for number, picture in enumerate(whole)]


# Patches


@pytest.mark.parametrize("limits", ["total", "frame"])
@pytest.mark.parametrize(("count", "width", "height"), [(2, 200, 90), (3, 64, 64), (5, 30, 300), (8, 500, 333)])
@pytest.mark.parametrize("bounds", [(1, 200_000), (60_000, 10**6)])
def test_patches_are_those_of_transformers(
    limits: str, count: int, width: int, height: int, bounds: tuple[int, int]
) -> None:
    size = 16 if limits == "total" else 14
    least, most = bounds
    process = native(patch_size=size, video_min_pixels=least, video_max_pixels=most, video_limits=limits)
    seen = frames(count, width, height)
    views = process.video(seen)
    processor: Any = (Qwen3VLVideoProcessor if limits == "total" else Qwen2VLVideoProcessor)(
        patch_size=size, size={"shortest_edge": least, "longest_edge": most}, do_sample_frames=False,
        do_rescale=False, do_normalize=False, cap_pixels_per_frame=False,
    )  # fmt: skip
    made = processor([np.stack([np.asarray(image.data) for _, image in seen])], return_tensors="pt")
    assert made["video_grid_thw"].tolist() == [list(views.grid or ())]
    difference = (views.pixels.float() - made["pixel_values_videos"].float()).abs()
    assert difference.mean() < 0.05  # levels of 255; measured 0: the same kernel of PyTorch resizes
    assert difference.max() <= 1
    assert len(views) == len(process.video_without_pixels(seen))
    assert views.times == process.video_without_pixels(seen).times == tuple(time for time, _ in seen)


def test_patches_can_be_put_together_again() -> None:
    views = native().video(frames(3, 96, 64))
    assert views.grid == (2, 4, 6)
    whole = unpatched(views.pixels, views.grid, 2)
    expected = [torch.from_numpy(np.array(image.data)).permute(2, 0, 1) for _, image in frames(3, 96, 64)]
    assert torch.equal(whole, torch.stack([*expected, expected[-1]]))


def test_one_frame_stands_for_two() -> None:
    views = native().video(frames(1, 96, 64))
    picture = native(min_pixels=1)(frames(1, 96, 64)[0][1].data, np.random.default_rng(0))  # type: ignore[arg-type]
    assert torch.equal(views.pixels, picture.pixels)
    assert views.grid == picture.grid
    assert (step_times(views.times or ()), seconds_a_step(views.times or ())) == ([0.25], 0)


def test_frames_are_bounded_together_or_each() -> None:
    size = {"width": 640, "height": 480}
    assert native(video_max_pixels=640 * 480 * 2).video_grid(8, **size)[1:] < (30, 40)
    assert native(video_max_pixels=640 * 480, video_limits="frame").video_grid(8, **size) == (4, 30, 40)
    with pytest.raises(ValueError, match="video_min_pixels"):
        native(video_min_pixels=10**9)


# Positions


@pytest.mark.parametrize("tokens_per_second", [2, 4, 3, 25])
@pytest.mark.parametrize("spacing", [0.04, 1 / 3, 0.5, 0.7, 1.1, 13.0])
def test_positions_in_seconds_are_those_of_transformers(tokens_per_second: int, spacing: float) -> None:
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                     "intermediate_size": 32, "vocab_size": 64},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32,
                       "tokens_per_second": tokens_per_second},
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen2_5_VLModel(config)
    times = tuple((index + 0.5) * spacing for index in range(25))
    views = Views(torch.empty(0), (13, 4, 2), times)
    kinds = torch.tensor([[0] * 3 + [2] * 26 + [0] * 4])
    seconds = torch.tensor([2 / (1 / spacing)])  # as the processor has it, from frames a second
    grids = torch.tensor([views.grid])
    expected, _ = model.get_rope_index(kinds, kinds, video_grid_thw=grids, second_per_grid_ts=seconds)
    ours = mrope_positions(33, [range(3, 29)], boxes(views, tokens_per_second), 2)
    assert ours.tolist() == expected[:, 0].tolist()


# Samples


@pytest.fixture(scope="module")
def context() -> TextContext:
    """Of a model that reads times, as Qwen3-VL."""
    tokenizer: Any = train_tokenizer(["0.5 seconds what happens yes"], vocab_size=320)
    tokenizer.add_special_tokens({"extra_special_tokens": MARKS})
    return TextContext(tokenizer, 0.25, 200, 2, (MARKS[0], MARKS[1]), (MARKS[2], MARKS[3]))  # type: ignore[arg-type]


@pytest.fixture
def clip(tmp_path: Path) -> Video:
    """Five frames of 64 x 64 pixels, a second each: three steps of four tokens."""
    (tmp_path / "clip").mkdir()
    for number, (_, image) in enumerate(frames(5, 64, 64)):
        assert isinstance(image.data, PIL.Image.Image)
        image.data.save(tmp_path / "clip" / f"{number}.png")
    return Video(str(tmp_path / "clip"))


def source(text: Any, talk: Conversation, video: VideoConfig | None = None, *, images: ImageProcessor) -> Source:
    return Source("d", [talk], images, text, video or VideoConfig(num_frames=5))


def encode(text: Any, talk: Conversation, **options: Any) -> Sample:
    return EncodedDataset([source(text, talk, images=native(), **options)], seed=0)[KEY]


def talk_about(*said: Any, answer: str = "yes") -> Conversation:
    return Conversation("c", (Turn("user", said), Turn("assistant", (Text(answer),))))


def written(sample: Sample, context: TextContext) -> str:
    return str(context.tokenizer.decode(sample.input_ids))


STEP = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
TIMED = f"<|vision_start|><1.0 seconds>{STEP}<3.0 seconds>{STEP}<4.5 seconds>{STEP}<|vision_end|>"
PLACED = f"<|vision_start|>{'<|video_pad|>' * 12}<|vision_end|>"


@pytest.mark.parametrize("tokens_per_second", [None, 2.0])
def test_what_stands_for_a_video(context: TextContext, clip: Video, tokens_per_second: float | None) -> None:
    context = dataclasses.replace(context, tokens_per_second=tokens_per_second)
    sample = encode(Chat(ChatConfig(), context), talk_about(clip, Text("what")))
    shown = TIMED if tokens_per_second is None else PLACED
    assert written(sample, context) == f"<|im_start|>user\n{shown}what<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert sample.image_grids is not None
    assert sample.image_grids.tolist() == [[3, 4, 4]]
    place_ids = sample.input_ids[sample.image_index].tolist()
    assert place_ids == [context.tokenizer.convert_tokens_to_ids("<|video_pad|>")] * 12
    assert (sample.labels >= 0).sum() == len(context.tokenizer("yes<|im_end|>").input_ids)
    plain = encode(Plain(PlainConfig(), context), talk_about(clip))
    assert written(plain, context) == f"{shown}yes<|im_end|>"


def test_all_of_what_users_say_is_learned_but_not_the_video(context: TextContext, clip: Video) -> None:
    sample = encode(Chat(ChatConfig(train_on="all"), context), talk_about(clip, Text("what")))
    assert written(dataclasses.replace(sample, input_ids=sample.labels.clamp(min=0)), context).count("seconds") == 0


def test_frames_and_times_follow_fps(context: TextContext, clip: Video) -> None:
    text = Chat(ChatConfig(), context)
    sample = encode(text, talk_about(clip), video=VideoConfig(fps=0.4))
    assert "<2.5 seconds>" in written(sample, context)  # (1.25 + 3.75) / 2
    assert "<4.5 seconds>" in written(encode(text, talk_about(clip), video=VideoConfig(fps=1)), context)


@pytest.mark.parametrize("kind", ["timed", "placed"])
@pytest.mark.parametrize("policy", ["turns", "cut", "sample"])
def test_no_limit_cuts_a_video(context: TextContext, clip: Video, kind: str, policy: str) -> None:
    context = dataclasses.replace(context, tokens_per_second=None if kind == "timed" else 2.0)
    turns = (*talk_about(Text("what")).turns, *talk_about(Text("what"), clip).turns)
    whole = len(encode(Chat(ChatConfig(), context), Conversation("c", turns)).input_ids)
    lengths = set()
    for limit in range(15, whole + 1):
        text = Chat(ChatConfig(too_long=policy), dataclasses.replace(context, max_length=limit))
        try:
            sample = encode(text, Conversation("c", turns))
        except SampleError:
            continue
        lengths.add(len(sample.input_ids))
        assert len(sample.input_ids) <= limit
        assert len(sample.image_index) in (0, 12)
        assert len(sample.images) == 4 * len(sample.image_index)
        ids = sample.input_ids.tolist()
        starts, ends = (ids.count(context.tokenizer.convert_tokens_to_ids(mark)) for mark in MARKS[:2])
        assert starts == ends
        assert "<1.0 sec" not in written(sample, context) or starts == 4
    assert whole in lengths
    assert len(lengths) >= {"turns": 2, "cut": 3, "sample": 1}[policy]


def test_a_cut_leaves_all_or_nothing_of_a_video() -> None:
    for length in range(12):
        tokens = Tokens()
        tokens.add([1, 2])
        for _ in range(2):
            tokens.add([8])
            tokens.add_places(9, 2)
        tokens.end_picture(2)
        tokens.add([3, 4])
        tokens.cut(length)
        assert len(tokens) == (min(length, 10) if length <= 2 or length >= 8 else 2)
        assert len(tokens.runs) == 2 * len(tokens.pictures) == (2 if length >= 8 else 0)


def test_counting_decodes_no_frames(context: TextContext, clip: Video, monkeypatch: pytest.MonkeyPatch) -> None:
    data = EncodedDataset([source(Chat(ChatConfig(), context), talk_about(clip), images=native())], seed=0)
    sample = data[KEY]
    monkeypatch.setattr(ImageNative, "open", lambda *_: pytest.fail("a frame was decoded"))
    assert data.count(0, 0) == (len(sample.input_ids), len(sample.images))


@pytest.mark.parametrize("rotation", [0, 90])
def test_counting_agrees_with_encoding_of_a_file(context: TextContext, tmp_path: Path, rotation: int) -> None:
    clip = write(tmp_path / "a.mp4", rotation=rotation)  # 50 frames of 32 x 16 pixels in 5 s
    options = {"images": native(video_min_pixels=10 * 64 * 32), "video": VideoConfig(fps=2)}
    data = EncodedDataset([source(Chat(ChatConfig(), context), talk_about(clip, Text("what")), **options)], seed=0)
    sample = data[KEY]
    assert sample.image_grids is not None
    assert sample.image_grids.tolist() == [[5, 2, 4] if rotation == 0 else [5, 4, 2]]
    assert data.count(0, 0) == (len(sample.input_ids), len(sample.images))
    assert "<0.5 seconds>" in written(sample, context)


# Where it does not fit


def test_models_with_pictures_of_one_size_still_get_frames(context: TextContext, clip: Video) -> None:
    fixed = dataclasses.replace(context, tokens_per_image=3, merge_size=None, image_marks=None, placeholders=None)
    images = ImageEval(ImageEvalConfig(image_size=32))
    made = source(
        Chat(ChatConfig(), fixed), talk_about(clip), VideoConfig(num_frames=3, timestamps=True), images=images
    )
    sample = EncodedDataset([made], seed=0)[KEY]
    assert sample.images.shape == (3, 3, 32, 32)
    assert len(sample.image_index) == 9


def test_frames_of_different_sizes_are_refused_by_name(context: TextContext, clip: Video) -> None:
    PIL.Image.new("RGB", (64, 32)).save(Path(clip.path) / "3.png")
    with pytest.raises(SampleError, match=r"3\.png\): the frames of the video differ in size.*64 x 32.*64 x 64"):
        encode(Chat(ChatConfig(), context), talk_about(clip))


def test_frames_that_are_too_long_and_thin(context: TextContext, clip: Video) -> None:
    for number in range(5):
        PIL.Image.new("RGB", (10_000, 33)).save(Path(clip.path) / f"{number}.png")
    with pytest.raises(SampleError, match=r"too long and thin.*10000 x 33"):
        encode(Chat(ChatConfig(), context), talk_about(clip))


def test_times_of_ones_own_are_refused(context: TextContext, clip: Video) -> None:
    with pytest.raises(ConfigError, match=r"datasets\.d\.video\.timestamps"):
        encode(Chat(ChatConfig(), context), talk_about(clip), video=VideoConfig(timestamps=True))
