"""Samples -> one `Batch`: a row's samples are joined, rows are padded. Counts are checked where the id is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from lavis_ds.batch import (
    IGNORE_INDEX,
    PADDING_SEGMENT,
    PREFIX_SEGMENT,
    SEGMENT_STRIDE,
    Batch,
    DatasetCounts,
    Sample,
    Unusable,
)
from lavis_ds.errors import DataError, SampleError

_NO_IMAGES = torch.empty((0, 3, 0, 0), dtype=torch.uint8)


class Collator:
    """Joins the samples of each row, pads rows to one length, and joins their pictures.

    Args:
        pad_id: token id on padding.
        image_shape: (3, H, W) of a view of the model's pictures, (D,) of a patch; None where it has no vision part.
        tokens_per_image: tokens that a view fills; 0 where the model has no vision part.
        datasets: names of all datasets of the run, in the order of `Sample.dataset`.
        padding_side: right for training; left for generation, so that all prompts end together.
        merge_size: patches a side of a token, at native resolution; None elsewhere.
        mrope: whether positions at native resolution are those in time, height and width.
        pad_to_multiple_of: row lengths are rounded up to a multiple of this, which suits GPUs' matrix units.
    """

    def __init__(
        self,
        pad_id: int,
        image_shape: tuple[int, ...] | None,
        *,
        tokens_per_image: int | Fraction,
        datasets: Sequence[str],
        padding_side: Literal["right", "left"] = "right",
        merge_size: int | None = None,
        mrope: bool = True,
        pad_to_multiple_of: int = 8,
    ) -> None:
        self.pad_id, self.image_shape, self.tokens_per_image = pad_id, image_shape, tokens_per_image
        self.datasets, self.padding_side, self.pad_to_multiple_of = tuple(datasets), padding_side, pad_to_multiple_of
        self.merge_size = merge_size
        self._blank = _blank(pad_id, mrope=mrope and merge_size is not None)

    def __call__(self, rows: Sequence[Sequence[Sample]], unusable: Sequence[Unusable] = ()) -> Batch:
        """The batch of `rows` of checked samples; rows without samples go last and hold a token that is no target."""
        filled = [row for row in rows if row]
        samples = [sample for row in filled for sample in row]
        joined = [_join(row) for row in filled] + [self._blank] * (len(rows) - len(filled))
        lengths = torch.tensor([sample.input_ids.numel() for sample in joined])
        width = -(-int(lengths.max()) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        starts = width - lengths if self.padding_side == "left" else torch.zeros_like(lengths)
        labels = self._padded([sample.labels for sample in joined], width, IGNORE_INDEX)
        targets = labels[:, 1:] != IGNORE_INDEX
        target_index = _flat_index(targets, width)
        num_targets = int(targets.sum())
        weights = self._target_weights(joined, width, target_index)
        dataset = self._target_dataset(filled, len(rows), width, target_index)
        references = tuple(sample.references for sample in samples)
        places = torch.arange(width)
        return Batch(
            input_ids=self._padded([sample.input_ids for sample in joined], width, self.pad_id),
            labels=labels,
            position_ids=self._positions(joined, lengths, width),
            attention_mask=(places >= starts[:, None]) & (places < (starts + lengths)[:, None]),
            segment_ids=self._segments(joined, width),
            images=self._images(joined),
            image_grids=self._grids(joined),
            image_index=torch.cat([n * width + starts[n] + sample.image_index for n, sample in enumerate(joined)]),
            target_index=target_index,
            target_weights=weights,
            target_dataset=dataset,
            num_targets=num_targets,
            target_weight=float(num_targets) if weights is None else float(weights[:num_targets].sum()),
            num_tokens=int(lengths[: len(filled)].sum()),
            num_pairs=sum(sample.input_ids.numel() ** 2 for sample in samples) / 2,
            sample_ids=tuple(sample.id for sample in samples),
            positions=tuple(sample.position for sample in samples),
            num_dropped_turns=sum(sample.num_dropped_turns for sample in samples),
            by_dataset=self._count(samples, num_targets, weights, dataset),
            unusable=tuple(unusable),
            references=references if any(reference is not None for reference in references) else None,
        )

    def checked(self, sample: Sample) -> Sample:
        """The sample, whose pictures fit the model and their places.

        Raises:
            SampleError: the sample's pictures, their size or their places do not fit; the message names it.
        """
        num_images, places = sample.images.shape[0], sample.image_index.numel()
        if self.image_shape is None and num_images:
            raise _misfit(sample, "the sample has pictures, but the model has no vision part.")
        if num_images and sample.images.shape[1:] != self.image_shape:
            raise _misfit(
                sample,
                "the pictures have another size than the model's.",
                given=f"{tuple(sample.images.shape[1:])}",
                expected=f"{self.image_shape}",
                hint="Set `image_size` of the dataset's vis_processor to the vision encoder's."
                if self.merge_size is None
                else "Set the dataset's vis_processor to image_native, with the model's patch_size and merge_size.",
            )
        if places != num_images * self.tokens_per_image:
            raise _misfit(
                sample,
                "pictures and their places in the text differ in number.",
                given=f"{places} places, {num_images} picture(s)",
                expected=f"{num_images * self.tokens_per_image} places ({self.tokens_per_image} a picture)",
            )
        if sample.labels[0] != IGNORE_INDEX:
            raise _misfit(sample, "the first token is a target, but nothing before it predicts it.")
        return sample

    def _padded(self, rows: Sequence[Tensor], width: int, value: float) -> Tensor:
        padded = pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=self.padding_side)
        missing = width - padded.shape[1]
        return pad(padded, (missing, 0) if self.padding_side == "left" else (0, missing), value=value)

    def _positions(self, rows: Sequence[Sample], lengths: Tensor, width: int) -> Tensor:
        if rows[0].position_ids.dim() == 1:
            return self._positions_of([row.position_ids for row in rows], lengths, width)
        return torch.stack(
            [self._positions_of([row.position_ids[k] for row in rows], lengths, width) for k in range(3)]
        )

    def _positions_of(self, rows: Sequence[Tensor], lengths: Tensor, width: int) -> Tensor:
        """Left padding is all 0. Right padding counts on, for a restart would look like a further packed sample."""
        positions = self._padded(rows, width, 0)
        if self.padding_side == "left":
            return positions
        behind = torch.arange(width) - (lengths - 1)[:, None]  # 1, 2, ... on padding
        last = positions.gather(1, (lengths - 1)[:, None])
        return torch.where(behind > 0, last + behind, positions)

    def _images(self, rows: Sequence[Sample]) -> Tensor | None:
        if self.image_shape is None:
            return None
        pictures = [row.images for row in rows if row.images.shape[0]]
        if not pictures:
            return torch.zeros(((self.merge_size or 1) ** 2, *self.image_shape), dtype=torch.uint8)
        return torch.cat(pictures)

    def _grids(self, rows: Sequence[Sample]) -> Tensor | None:
        if self.merge_size is None:
            return None
        grids = [row.image_grids for row in rows if row.image_grids is not None and row.image_grids.shape[0]]
        return torch.cat(grids) if grids else torch.tensor([[1, self.merge_size, self.merge_size]])

    def _segments(self, rows: Sequence[Sample], width: int) -> Tensor | None:
        """A row of one causal sequence is all prefix."""
        if all(row.segment_ids is None for row in rows):
            return None
        return self._padded([_segments(row) for row in rows], width, PADDING_SEGMENT)

    def _target_weights(self, rows: Sequence[Sample], width: int, target_index: Tensor) -> Tensor | None:
        if all(row.target_weights is None for row in rows):
            return None
        return self._padded([_weights(row) for row in rows], width, 1.0).flatten()[target_index + 1]

    def _count(
        self, samples: Sequence[Sample], num_targets: int, weights: Tensor | None, dataset: Tensor | None
    ) -> tuple[DatasetCounts, ...]:
        """What each dataset of the run has in the batch."""
        size = len(self.datasets)
        numbers = torch.zeros(num_targets, dtype=torch.int64) if dataset is None else dataset[:num_targets]
        sums = torch.bincount(numbers, None if weights is None else weights[:num_targets].double(), minlength=size)
        num_samples, num_tokens = [0] * size, [0] * size
        for sample in samples:
            num_samples[sample.dataset] += 1
            num_tokens[sample.dataset] += sample.input_ids.numel()
        return tuple(map(DatasetCounts, self.datasets, num_samples, num_tokens, map(float, sums)))

    def _target_dataset(
        self, rows: Sequence[Sequence[Sample]], num_rows: int, width: int, target_index: Tensor
    ) -> Tensor | None:
        if len(self.datasets) < 2:
            return None
        numbers = [torch.cat([torch.full_like(s.input_ids, s.dataset) for s in row]) for row in rows]
        empty = [torch.zeros(1, dtype=torch.int64)] * (num_rows - len(rows))
        return self._padded([*numbers, *empty], width, 0).flatten()[target_index + 1]


def _misfit(sample: Sample, what: str, **details: str) -> SampleError:
    return SampleError.about(sample.id, DataError(what, where=sample.id, **details))


def _join(samples: Sequence[Sample]) -> Sample:
    """One sequence of several samples, none of which sees another."""
    if len(samples) == 1:
        return samples[0]
    starts = [0]
    for sample in samples:
        starts.append(starts[-1] + len(sample.input_ids))
    weighted = any(sample.target_weights is not None for sample in samples)
    grids = [grid for sample in samples if (grid := sample.image_grids) is not None]
    return replace(
        samples[0],
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        labels=torch.cat([sample.labels for sample in samples]),
        position_ids=torch.cat([sample.position_ids for sample in samples], dim=-1),
        segment_ids=torch.cat([_segments(sample) + d * SEGMENT_STRIDE for d, sample in enumerate(samples)]),
        target_weights=torch.cat([_weights(sample) for sample in samples]) if weighted else None,
        images=torch.cat([s.images for s in samples if len(s.images)] or [_NO_IMAGES]),
        image_grids=torch.cat(grids) if grids else None,
        image_index=torch.cat([start + s.image_index for start, s in zip(starts, samples, strict=False)]),
    )


def _segments(sample: Sample) -> Tensor:
    return torch.full_like(sample.input_ids, PREFIX_SEGMENT) if sample.segment_ids is None else sample.segment_ids


def _weights(sample: Sample) -> Tensor:
    return torch.ones(len(sample.input_ids)) if sample.target_weights is None else sample.target_weights


def _blank(pad_id: int, *, mrope: bool) -> Sample:
    """What a row without samples holds."""
    token, no_places = torch.full((1,), pad_id), torch.empty(0, dtype=torch.int64)
    position = torch.zeros((3, 1) if mrope else (1,), dtype=torch.int64)
    return Sample("", token, torch.full_like(token, IGNORE_INDEX), position, _NO_IMAGES, no_places)


def _flat_index(targets: Tensor, width: int) -> Tensor:
    """Flat positions in (B * T) whose next token is a target; position 0, whose next is none, where there are none."""
    row, column = targets.nonzero(as_tuple=True)
    index = row * width + column
    return index if len(index) else torch.zeros(1, dtype=torch.int64)
