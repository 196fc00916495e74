"""The map-style dataset: a `SampleKey` in, an encoded `Sample` out."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lavis_ds.batch import Sample
from lavis_ds.config.schema import VideoConfig
from lavis_ds.data import video
from lavis_ds.data.builders.base import ConversationStream
from lavis_ds.data.conversation import Conversation, Image
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.base import ImageProcessor, TextProcessor
from lavis_ds.data.processors.views import Views, as_views
from lavis_ds.errors import DataError, LavisError, SampleError


@dataclass(frozen=True)
class Source:
    """One split of one dataset, with the processors to use on it.

    Attributes:
        name: the entry's name in `datasets:`.
        conversations: its samples.
        image_processor: None where the samples have no pictures.
        text_processor: makes ids and labels.
        video: which frames of videos are used.
    """

    name: str
    conversations: Sequence[Conversation] | ConversationStream
    image_processor: ImageProcessor | None
    text_processor: TextProcessor
    video: VideoConfig = VideoConfig()  # noqa: RUF009 (frozen)


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
        return self.encode(self._conversation(key.dataset, key.index), key)

    def encode(self, conversation: Conversation, key: SampleKey) -> Sample:
        """As `[key]`, of a conversation that is there already.

        Raises:
            SampleError: as on access.
        """
        source = self.sources[key.dataset]
        rng = np.random.default_rng([self.seed, key.epoch, key.dataset, key.index])
        with _named(source, conversation) as conversation:
            if conversation.videos:
                conversation = video.expand(conversation, source.video)
            images = [_pixels(source.image_processor, image, conversation.id, rng) for image in conversation.images]
            if self.as_prompts:
                sample = source.text_processor.prompt(_with_question(conversation), images)
            else:
                sample = source.text_processor(conversation, images, rng)
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
            if conversation.videos:
                conversation = video.expand(conversation, source.video, pixels=False)
            images = [_no_pixels(source.image_processor, image, conversation.id) for image in conversation.images]
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
    asked = {"question": question, "images": [image.path for image in conversation.images]}
    return replace(conversation, references={**asked, **conversation.references})


def _pixels(processor: ImageProcessor | None, image: Image, sample_id: str, rng: np.random.Generator) -> Views:
    processor = _required(processor, sample_id)
    return as_views(processor(processor.open(image), rng))


def _no_pixels(processor: ImageProcessor | None, image: Image, sample_id: str) -> Views:
    """All that counting tokens needs to know of a picture: V."""
    return Views(torch.empty((_required(processor, sample_id).count_views(image), 3, 0, 0), dtype=torch.uint8))


def _required(processor: ImageProcessor | None, sample_id: str) -> ImageProcessor:
    if processor is None:
        raise DataError("the sample has pictures, but the dataset has no `vis_processor`.", where=sample_id)
    return processor
