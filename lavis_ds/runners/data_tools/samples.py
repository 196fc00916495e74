"""One sample taken apart: its pictures and views, its text token by token, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lavis_ds.batch import IGNORE_INDEX, Sample
from lavis_ds.data.conversation import Conversation, Image, Text, Video
from lavis_ds.data.dataset import Source
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.native import unpatched
from lavis_ds.data.processors.open_image import image_size
from lavis_ds.data.video import frame_images
from lavis_ds.errors import DataError
from lavis_ds.models.base import Model
from lavis_ds.runners.data_tools.encoded import Encoded
from lavis_ds.runners.data_tools.token_text import Piece, pieces, visible


@dataclass(frozen=True)
class Picture:
    """A picture, video or frame of a sample.

    Attributes:
        image: the original; of a video its first frame.
        size: (width, height) of it, upright.
        views: (V, 3, H, W) uint8, what the model sees; none where the picture was left out with its turn.
        num_tokens: places it takes among the tokens.
    """

    image: Image
    size: tuple[int, int]
    views: Tensor
    num_tokens: int


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one kind.

    Attributes:
        start: place of the first in the sample.
        num_tokens: how many.
        picture: number of the picture whose places they are, from 0; None where they are text.
        pieces: their text.
        weight: factor of their losses; 0 where they are no targets.
        segment: number of their segment.
    """

    start: int
    num_tokens: int
    picture: int | None
    pieces: tuple[Piece, ...]
    weight: float
    segment: int


@dataclass(frozen=True)
class Look:
    """A sample to look at.

    Attributes:
        id: as in messages.
        index: its number in its dataset.
        sample: None where it can't be used.
        error: why it can't be used.
        raw: what each turn says before it is encoded, where the sample can't be used.
        pictures: in order.
        stretches: in order.
    """

    id: str
    index: int
    sample: Sample | None = None
    error: str | None = None
    raw: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    stretches: tuple[Stretch, ...] = ()


def look(encoded: Encoded, key: SampleKey) -> Look:
    """The sample of `key`, as training gets it."""
    try:
        sample = encoded.data[key]
        encoded.collator.checked(sample)
    except DataError as error:
        sample_id = getattr(error, "sample_id", "") or encoded.data.name_of(key)
        return Look(sample_id, key.index, error=str(error), raw=tuple(_raw(encoded, key)))
    source = encoded.data.sources[key.dataset]
    pictures = _pictures(sample, source.with_frames(encoded.conversation(key)), source, encoded.model)
    stretches = _stretches(sample, pictures, encoded)
    return Look(sample.id, key.index, sample, pictures=pictures, stretches=tuple(stretches))


def _raw(encoded: Encoded, key: SampleKey) -> Iterator[tuple[str, str]]:
    """Role and content of each turn, as far as the annotation can be read at all."""
    try:
        conversation = encoded.conversation(key)
    except DataError:
        return
    for turn in conversation.turns:
        parts = (
            part.text if isinstance(part, Text) else f"<{type(part).__name__.lower()} {part.path[:200]}>"
            for part in turn.content
        )
        yield turn.role, visible("".join(parts))


def _pictures(sample: Sample, conversation: Conversation, source: Source, model: Model) -> tuple[Picture, ...]:
    """All pictures of the conversation with their views; those left out with their turns come last and have none."""
    processor = source.image_processor
    if processor is None:
        return ()
    grids = [] if sample.image_grids is None else sample.image_grids.tolist()
    pictures, start = [], 0
    for number, part in enumerate(conversation.pictures):
        is_video = isinstance(part, Video)
        image = frame_images(part, source.video)[0][1] if isinstance(part, Video) else part
        count = math.prod(grids[number]) if number < len(grids) else processor.count_views(image)
        views = sample.images[start : start + count]
        start, num_tokens = start + len(views), int(len(views) * model.tokens_per_image)
        if model.merge_size is not None and number < len(grids):
            frames = unpatched(views, grids[number], model.merge_size)
            views = frames if is_video else frames[:1]
        size = image_size(image, max_pixels=processor.config.max_file_pixels)
        pictures.append(Picture(image, size, views, num_tokens))
    return tuple(pictures)


def _stretches(sample: Sample, pictures: Sequence[Picture], encoded: Encoded) -> Iterator[Stretch]:
    ids: list[int] = sample.input_ids.tolist()
    columns = (_picture_of_token(sample, pictures), _weights(sample), _segments(sample))
    kinds = list(zip(*(column.tolist() for column in columns), strict=True))
    for (picture, weight, segment), group in groupby(range(len(ids)), key=kinds.__getitem__):
        places = list(group)
        own = ids[places[0] : places[-1] + 1]
        text = tuple(pieces(encoded.model.tokenizer, own)) if picture < 0 else ()
        yield Stretch(places[0], len(own), None if picture < 0 else picture, text, weight, segment)


def _picture_of_token(sample: Sample, pictures: Sequence[Picture]) -> Tensor:
    """(S,) number of the picture whose place each token is; -1 for text."""
    counts = torch.tensor([picture.num_tokens for picture in pictures], dtype=torch.int64)
    result = torch.full_like(sample.input_ids, -1)
    result[sample.image_index] = torch.arange(len(pictures)).repeat_interleave(counts)
    return result


def _weights(sample: Sample) -> Tensor:
    """(S,) factor of each token's loss; 0 where it is no target."""
    is_target = (sample.labels != IGNORE_INDEX).float()
    return is_target if sample.target_weights is None else is_target * sample.target_weights


def _segments(sample: Sample) -> Tensor:
    return torch.zeros_like(sample.input_ids) if sample.segment_ids is None else sample.segment_ids
