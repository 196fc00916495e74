"""Samples -> one padded `Batch`, with every count checked here, where the sample's id is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lavis_ds.batch import IGNORE_INDEX, PADDING_SEGMENT, PREFIX_SEGMENT, Batch, Sample
from lavis_ds.errors import DataError

Row = tuple[Sample, bool]
"""A sample, and whether it is a filler."""


class Collator:
    """Pads samples to one length and joins their pictures.

    Args:
        pad_id: token id on padding.
        image_shape: (3, H, W) of the model's pictures; None where it has no vision part.
        tokens_per_image: tokens that a picture fills; 0 where the model has no vision part.
        padding_side: right for training; left for generation, so that all prompts end together.
        pad_to_multiple_of: row lengths are rounded up to a multiple of this, which suits GPUs' matrix units.
    """

    def __init__(
        self,
        pad_id: int,
        image_shape: tuple[int, int, int] | None,
        *,
        tokens_per_image: int,
        padding_side: Literal["right", "left"] = "right",
        pad_to_multiple_of: int = 8,
    ) -> None:
        self.pad_id, self.image_shape, self.tokens_per_image = pad_id, image_shape, tokens_per_image
        self.padding_side, self.pad_to_multiple_of = padding_side, pad_to_multiple_of

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """The batch of `rows`; real samples come before fillers.

        Raises:
            DataError: a sample's pictures, their size or their places do not fit; the message names it.
        """
        samples, is_filler = [sample for sample, _ in rows], [filler for _, filler in rows]
        if sorted(is_filler) != is_filler:
            raise ValueError("fillers must come after all real samples, so that row i is the sample sample_ids[i]")
        for sample in samples:
            self._check(sample)
        real = samples[: is_filler.count(False)]
        width = (
            -(-max(len(sample.input_ids) for sample in samples) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        )
        labels = self._padded([_labels(*row) for row in rows], width, IGNORE_INDEX)
        targets = labels[:, 1:] != IGNORE_INDEX
        references = tuple(None if filler else sample.references for sample, filler in rows)
        return Batch(
            input_ids=self._padded([sample.input_ids for sample in samples], width, self.pad_id),
            labels=labels,
            position_ids=self._positions(samples, width),
            attention_mask=self._padded([torch.ones_like(s.input_ids, dtype=torch.bool) for s in samples], width, 0),
            images=self._images(samples),
            image_index=self._image_index(samples, width),
            target_index=_flat_index(targets, width),
            num_targets=int(targets.sum()),
            num_tokens=sum(len(sample.input_ids) for sample in real),
            num_samples=len(real),
            sample_ids=tuple(sample.id for sample in real),
            segment_ids=self._segments(samples, width),
            references=references if any(reference is not None for reference in references) else None,
        )

    def _check(self, sample: Sample) -> None:
        num_images, places = len(sample.images), len(sample.image_index)
        if self.image_shape is None and num_images:
            raise DataError("the sample has pictures, but the model has no vision part.", where=sample.id)
        if places != num_images * self.tokens_per_image:
            raise DataError(
                "pictures and their places in the text differ in number.",
                where=sample.id,
                given=f"{places} places, {num_images} picture(s)",
                expected=f"{num_images * self.tokens_per_image} places ({self.tokens_per_image} a picture)",
            )
        if num_images and sample.images.shape[1:] != self.image_shape:
            raise DataError(
                "the pictures have another size than the model's.",
                where=sample.id,
                given=f"{tuple(sample.images.shape[1:])}",
                expected=f"{self.image_shape}",
                hint="Set `image_size` of the dataset's vis_processor to the vision encoder's.",
            )
        if sample.labels[0] != IGNORE_INDEX:
            raise DataError("the first token is a target, but nothing before it predicts it.", where=sample.id)

    def _padded(self, rows: Sequence[Tensor], width: int, value: int) -> Tensor:
        padded = rows[0].new_full((len(rows), width), value)
        for target, row in zip(padded, rows, strict=True):
            start = self._start(len(row), width)
            target[start : start + len(row)] = row
        return padded

    def _start(self, length: int, width: int) -> int:
        return width - length if self.padding_side == "left" else 0

    def _positions(self, samples: Sequence[Sample], width: int) -> Tensor:
        """Left padding is all 0. Right padding counts on, for a restart would look like a second packed sample."""
        positions = self._padded([sample.position_ids for sample in samples], width, 0)
        if self.padding_side == "right":
            for row, sample in zip(positions, samples, strict=True):
                length = len(sample.position_ids)
                row[length:] = sample.position_ids[-1] + torch.arange(1, width - length + 1)
        return positions

    def _images(self, samples: Sequence[Sample]) -> Tensor | None:
        if self.image_shape is None:
            return None
        pictures = [sample.images for sample in samples if len(sample.images)]
        return torch.cat(pictures) if pictures else torch.zeros((1, *self.image_shape), dtype=torch.uint8)

    def _image_index(self, samples: Sequence[Sample], width: int) -> Tensor:
        starts = [row * width + self._start(len(sample.input_ids), width) for row, sample in enumerate(samples)]
        return torch.cat([start + sample.image_index for start, sample in zip(starts, samples, strict=True)])

    def _segments(self, samples: Sequence[Sample], width: int) -> Tensor | None:
        """A row of one causal sequence is all prefix."""
        if all(sample.segment_ids is None for sample in samples):
            return None
        whole = [torch.full_like(sample.input_ids, PREFIX_SEGMENT) for sample in samples]
        rows = [w if s.segment_ids is None else s.segment_ids for w, s in zip(whole, samples, strict=True)]
        return self._padded(rows, width, PADDING_SEGMENT)


def _labels(sample: Sample, is_filler: bool) -> Tensor:
    return torch.full_like(sample.labels, IGNORE_INDEX) if is_filler else sample.labels


def _flat_index(targets: Tensor, width: int) -> Tensor:
    """Flat positions in (B * T) whose next token is a target; position 0, whose next is none, where there are none."""
    row, column = targets.nonzero(as_tuple=True)
    index = row * width + column
    return index if len(index) else torch.zeros(1, dtype=torch.int64)
