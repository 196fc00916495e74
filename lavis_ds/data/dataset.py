"""The map-style dataset: a `SampleKey` in, an encoded `Sample` out."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lavis_ds.batch import Sample
from lavis_ds.config.schema import VideoConfig
from lavis_ds.data import video
from lavis_ds.data.builders.base import ConversationStream
from lavis_ds.data.conversation import Conversation, Image, Video
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.base import ImageProcessor, TextProcessor
from lavis_ds.data.processors.native import ImageNative
from lavis_ds.data.processors.views import Views, as_views
from lavis_ds.errors import ConfigError, DataError, LavisError, SampleError


@dataclass(frozen=True)
class Source:
    """One split of one dataset, with the processors to use on it.

    Attributes:
        name: the entry's name in `datasets:`.
        conversations: its samples.
        image_processor: None where the samples have no pictures.
        text_processor: makes ids and labels.
        video: which frames of videos are used.

    Raises:
        ConfigError: times are asked for before the frames of videos that the model takes whole.
    """

    name: str
    conversations: Sequence[Conversation] | ConversationStream
    image_processor: ImageProcessor | None
    text_processor: TextProcessor
    video: VideoConfig = VideoConfig()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if self.video.timestamps and self.takes_videos:
            raise ConfigError(
                "the model takes videos whole and has its own way to tell times.",
                where=f"datasets.{self.name}.video.timestamps",
                expected="false",
            )

    @property
    def takes_videos(self) -> bool:
        """Whether the model takes a video as one thing with a time axis; else its frames are pictures."""
        return isinstance(self.image_processor, ImageNative) and self.text_processor.context.merge_size is not None

    def with_frames(self, conversation: Conversation, *, pixels: bool = True) -> Conversation:
        """The conversation with frames in the place of videos that the model can't take; see `video.expand`."""
        if not conversation.videos or self.takes_videos:
            return conversation
        return video.expand(conversation, self.video, pixels=pixels)


class Opened(NamedTuple):
    """A sample whose pictures are decoded and whose text is not encoded yet.

    Attributes:
        key: which it is.
        conversation: under its full id, without videos.
        images: its pictures.
        rng: its source of randomness, used for the pictures already.
    """

    key: SampleKey
    conversation: Conversation
    images: list[Views]
    rng: np.random.Generator


class EncodedDataset(Dataset[Sample]):
    """All sources of a run, encoded on access. The same key gives the same sample in any process.

    Args:
        sources: numbered as in `SampleKey.dataset`.
        seed: with the key, seeds augmentation.
        as_prompts: encode for generation, without the last answer.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, as_prompts: bool = False) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        self.as_prompts = as_prompts

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each source; 0 for a stream."""
        return tuple(_size(source.conversations) for source in self.sources)

    def __len__(self) -> int:
        return sum(self.sizes)

    def name_of(self, key: SampleKey) -> str:
        """What to call the sample of `key` where its conversation can't be read."""
        return f"{self.sources[key.dataset].name}[{key.index}]"

    def __getitem__(self, key: SampleKey) -> Sample:
        """The sample of `key`; its id is `<dataset name>/<conversation id>`.

        Raises:
            SampleError: anything about the sample went wrong; the message names it, and the file where it is one.
        """
        return self.encode(self.open(key))

    def open(self, key: SampleKey) -> Opened:
        """The sample of `key`, its pictures decoded; `encode` does the rest.

        Raises:
            SampleError: as on access.
        """
        return self.open_conversation(self._conversation(key.dataset, key.index), key)

    def open_conversation(self, conversation: Conversation, key: SampleKey) -> Opened:
        """As `open`, of a conversation that is there already.

        Raises:
            SampleError: as on access.
        """
        source = self.sources[key.dataset]
        rng = np.random.default_rng([self.seed, key.epoch, key.dataset, key.index])
        with _named(source, conversation) as conversation:
            conversation = source.with_frames(conversation)
            images = [_pixels(source, part, conversation.id, rng) for part in conversation.pictures]
            return Opened(key, conversation, images, rng)

    def encode(self, opened: Opened) -> Sample:
        """The sample of what `open` gave.

        Raises:
            SampleError: as on access.
        """
        key, conversation = opened.key, opened.conversation
        processor = self.sources[key.dataset].text_processor
        with _about(conversation.id):
            if self.as_prompts:
                sample = processor.prompt(_with_question(conversation), opened.images)
            else:
                sample = processor(conversation, opened.images, opened.rng)
            return replace(sample, dataset=key.dataset, position=key.position)

    def count(self, dataset: int, index: int) -> tuple[int, int]:
        """Tokens and views of pictures that a sample will have, without reading any pixels.

        Raises:
            SampleError: as on access, as far as that shows without pixels.
        """
        sample = self.without_pixels(dataset, index)
        return len(sample.input_ids), len(sample.images)

    def without_pixels(self, dataset: int, index: int) -> Sample:
        """The sample as on access, but its pictures are (n, 3, 0, 0).

        Raises:
            SampleError: as on access, as far as that shows without pixels.
        """
        source = self.sources[dataset]
        with _named(source, self._conversation(dataset, index)) as conversation:
            conversation = source.with_frames(conversation, pixels=False)
            images = [_no_pixels(source, part, conversation.id) for part in conversation.pictures]
            return source.text_processor(conversation, images, np.random.default_rng(0))

    def _conversation(self, dataset: int, index: int) -> Conversation:
        source = self.sources[dataset]
        with _about(f"{source.name}[{index}]"):
            indexed: Any = source.conversations
            conversation: Conversation = indexed[index]
            return conversation


def _size(conversations: Sequence[Conversation] | ConversationStream) -> int:
    return 0 if isinstance(conversations, ConversationStream) else len(conversations)


@contextmanager
def _named(source: Source, conversation: Conversation) -> Iterator[Conversation]:
    """The conversation under its full id, which also stands in whatever goes wrong with it."""
    sample_id = f"{source.name}/{conversation.id}"
    with _about(sample_id):
        yield replace(conversation, id=sample_id)


@contextmanager
def _about(sample_id: str) -> Iterator[None]:
    """What goes wrong inside is about this sample."""
    try:
        yield
    except LavisError as error:
        raise SampleError.about(sample_id, error) from error
    except Exception as error:
        what = DataError(f"the sample can't be encoded: {type(error).__name__}: {error}.", where=sample_id)
        failure = SampleError.about(sample_id, what)
        failure.add_note(traceback.format_exc())  # `from error` does not survive the way out of a worker process
        raise failure from error


def _with_question(conversation: Conversation) -> Conversation:
    """The references also say what was asked about which files, so that predictions can be read on their own."""
    if conversation.references is None:
        return conversation
    question = next((turn.text for turn in reversed(conversation.turns) if turn.role == "user"), "")
    asked = {"question": question, "images": [part.path for part in conversation.pictures]}
    return replace(conversation, references={**asked, **conversation.references})


def _pixels(source: Source, part: Image | Video, sample_id: str, rng: np.random.Generator) -> Views:
    processor = _required(source.image_processor, sample_id)
    if isinstance(part, Video):
        return _native(processor).video(video.frame_images(part, source.video))
    return as_views(processor(processor.open(part), rng))


def _no_pixels(source: Source, part: Image | Video, sample_id: str) -> Views:
    """All that counting tokens needs to know of a picture or video: V, and its times."""
    processor = _required(source.image_processor, sample_id)
    if isinstance(part, Video):
        return _native(processor).video_without_pixels(video.frame_images(part, source.video, pixels=False))
    return Views(torch.empty((processor.count_views(part), 3, 0, 0), dtype=torch.uint8))


def _native(processor: ImageProcessor) -> ImageNative:
    assert isinstance(processor, ImageNative)  # else frames would have taken the video's place
    return processor


def _required(processor: ImageProcessor | None, sample_id: str) -> ImageProcessor:
    if processor is None:
        raise DataError("the sample has pictures, but the dataset has no `vis_processor`.", where=sample_id)
    return processor
