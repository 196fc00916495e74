"""The map-style dataset: a `SampleKey` in, an encoded `Sample` out."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lavis_ds.batch import Sample
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.base import ImageProcessor, TextProcessor
from lavis_ds.data.processors.image import open_image
from lavis_ds.errors import DataError, LavisError


@dataclass(frozen=True)
class Source:
    """One split of one dataset, with the processors to use on it.

    Attributes:
        name: the entry's name in `datasets:`.
        conversations: its samples.
        image_processor: None where the samples have no pictures.
        text_processor: makes ids and labels.
    """

    name: str
    conversations: Sequence[Conversation]
    image_processor: ImageProcessor | None
    text_processor: TextProcessor


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
        """Number of samples of each source."""
        return tuple(len(source.conversations) for source in self.sources)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, key: SampleKey) -> Sample:
        """The sample of `key`; its id is `<dataset name>/<conversation id>`.

        Raises:
            DataError: anything about the sample went wrong; the message names the sample, and the file where it is one.
        """
        source = self.sources[key.dataset]
        sample_id = f"{source.name}[{key.index}]"
        try:
            conversation = source.conversations[key.index]
            sample_id = f"{source.name}/{conversation.id}"
            return self._encode(source, replace(conversation, id=sample_id), key)
        except LavisError as error:
            raise _about(sample_id, error) from error
        except Exception as error:
            failure = DataError(f"the sample can't be encoded: {type(error).__name__}: {error}.", where=sample_id)
            failure.add_note(traceback.format_exc())  # `from error` does not survive the way out of a worker process
            raise failure from error

    def _encode(self, source: Source, conversation: Conversation, key: SampleKey) -> Sample:
        rng = np.random.default_rng([self.seed, key.epoch, key.dataset, key.index])
        images = _pixels(source.image_processor, conversation, rng)
        if self.as_prompts:
            return source.text_processor.prompt(_with_question(conversation), images)
        return source.text_processor(conversation, images, rng)


def _with_question(conversation: Conversation) -> Conversation:
    """The references also say what was asked about which files, so that predictions can be read on their own."""
    if conversation.references is None:
        return conversation
    question = next((turn.text for turn in reversed(conversation.turns) if turn.role == "user"), "")
    asked = {"question": question, "images": [image.path for image in conversation.images]}
    return replace(conversation, references={**asked, **conversation.references})


def _pixels(processor: ImageProcessor | None, conversation: Conversation, rng: np.random.Generator) -> Tensor:
    if not conversation.images:
        return torch.empty((0, 3, 0, 0), dtype=torch.uint8)
    if processor is None:
        raise DataError("the sample has pictures, but the dataset has no `vis_processor`.", where=conversation.id)
    return torch.stack([processor(open_image(image.path), rng) for image in conversation.images])


def _about(sample_id: str, error: LavisError) -> LavisError:
    """`error` as one that names the sample."""
    if error.where == sample_id:
        return error
    place = f"{sample_id} ({error.where})" if error.where else sample_id
    return DataError(error.what, where=place, given=error.given, expected=error.expected, hint=error.hint)
