"""What travels from the data to the model: a `Sample` is one encoded example, a `Batch` is one micro-batch.

Shapes: B rows, T tokens a row, N images, Q tokens an image, S a sample's own length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is no target (the value of PyTorch's cross-entropy and of Hugging Face)."""

PREFIX_SEGMENT = 0
"""Segment of tokens that every later segment of the sample may attend to."""

SEGMENT_STRIDE = 1 << 20
"""Segment s of the d-th sample in a row is numbered d * SEGMENT_STRIDE + s; so its prefix is d * SEGMENT_STRIDE."""

PADDING_SEGMENT = -1

_SMALL_BYTES = 1 << 17


@dataclass(frozen=True)
class Sample:
    """One encoded example, on the CPU.

    Attributes:
        id: unique within the run; named in every message about the sample.
        input_ids: (S,) int64; image positions hold a filler id that the model replaces.
        labels: (S,) int64, equal to `input_ids` where the token is a target, else
            `IGNORE_INDEX`; the first never is one.
        position_ids: (S,) int64; (3, S) for time, height and width where the model has multimodal rotary positions.
        segment_ids: (S,) int64, or None where the whole sample is one causal sequence. A token attends to earlier
            tokens of its own segment and of `PREFIX_SEGMENT`.
        images: (n, 3, H, W) uint8, all views of all pictures in order of appearance; n may be 0. At native resolution
            (n, D): all patches of all pictures.
        image_grids: (pictures, 3) int64, patches of each picture or video along time, height and width; None at a
            fixed size.
        image_index: (n * Q,) int64, the positions in `input_ids` that the images' tokens fill, in order.
        target_weights: (S,) float32, factors of the targets' losses; None where all are 1.
        num_dropped_turns: turns left out because the sample was too long.
        dataset: number of its dataset.
        position: its place in the stream of samples.
        references: what evaluation compares with (answer text, question type, ...); not used in training.
    """

    id: str
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    images: Tensor
    image_index: Tensor
    image_grids: Tensor | None = None
    segment_ids: Tensor | None = None
    target_weights: Tensor | None = None
    num_dropped_turns: int = 0
    dataset: int = 0
    position: int = 0
    references: dict[str, Any] | None = None


@dataclass(frozen=True)
class Unusable:
    """A sample that was left out, and why.

    Attributes:
        id: as `Sample.id`.
        source: file, where one is known.
        reason: what is wrong with it.
    """

    id: str
    source: str | None
    reason: str


@dataclass(frozen=True)
class DatasetCounts:
    """What a batch holds of one dataset."""

    name: str
    num_samples: int = 0
    num_tokens: int = 0
    target_weight: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank: B rows, each of one sample or, packed, of several.

    Attributes:
        input_ids: (B, T) int64, padded.
        labels: (B, T) int64, `IGNORE_INDEX` on padding, prompts and fillers; not shifted.
        position_ids: (B, T) int64, or (3, B, T); see `Sample`.
        attention_mask: (B, T) bool, True on real tokens.
        segment_ids: (B, T) int64, or None where every row is one causal sequence; see `Sample` and `SEGMENT_STRIDE`.
            `PADDING_SEGMENT` on padding.
        images: (N, 3, H, W) uint8 with N >= 1: every micro-batch makes exactly one vision call, so a batch without
            images carries one blank image, whose tokens fill nothing. None where the model has no vision part. At
            native resolution (P, D) uint8: the patches of all pictures, in the order of transformers' Qwen2-VL image
            processor (blocks of merge_size x merge_size neighbours; D = channels, frames, rows, columns of a patch).
        image_grids: (N, 3) int64, patches of each picture or video along time, height and width; None at a fixed size.
        image_index: (M,) int64, flat positions in (B * T) filled by the images' tokens in order; M = N * Q, or 0.
        target_index: (K,) int64, flat positions in (B * T) whose next token is a target; K >= 1 (a filler where the
            batch has no target).
        target_weights: (K,) float32, factors of the targets' losses; None where all are 1.
        target_dataset: (K,) int64, numbers of the targets' datasets in `by_dataset`; None where there is one dataset.
        num_targets: number of target tokens.
        target_weight: sum of their weights; what the loss is divided by, summed over the global batch.
        num_tokens: number of real tokens.
        num_pairs: of real tokens of a sample of which the later sees the earlier.
        sample_ids: ids of the samples, in the order of rows; empty rows come last and have none.
        positions: the samples' places in the stream.
        num_dropped_turns: turns left out because samples were too long.
        by_dataset: counts of every dataset of the run.
        unusable: samples that were left out.
        stream_state: where the stream that this batch was read from goes on; None where data is indexed.
        references: one entry a sample, or None.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    images: Tensor | None
    image_index: Tensor
    target_index: Tensor
    num_targets: int
    target_weight: float
    num_tokens: int
    sample_ids: tuple[str, ...]
    positions: tuple[int, ...]
    by_dataset: tuple[DatasetCounts, ...]
    image_grids: Tensor | None = None
    segment_ids: Tensor | None = None
    target_weights: Tensor | None = None
    target_dataset: Tensor | None = None
    num_pairs: float = 0.0
    num_dropped_turns: int = 0
    unusable: tuple[Unusable, ...] = ()
    stream_state: dict[str, Any] | None = None
    references: tuple[dict[str, Any] | None, ...] | None = None

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device` (asynchronously from pinned memory).

        Grids and segments stay on the host, which lays out the work of tower and attention by them and would wait for
        the device.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, image_grids=self.image_grids, segment_ids=self.segment_ids)

    def pin_memory(self) -> Batch:
        """Called by PyTorch's DataLoader; makes the copy to the GPU asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    @staticmethod
    def is_large(tensor: Tensor) -> bool:
        """Whether it does not travel to another process inside the message."""
        return tensor.nbytes > _SMALL_BYTES

    def __getstate__(self) -> dict[str, Any]:
        """Small tensors travel to another process inside the message: a shared-memory segment each would cost more."""
        return {f.name: _packed(getattr(self, f.name)) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def _map(self, function: Any) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in tensors.items() if isinstance(t, Tensor)})


def _packed(value: Any) -> Any:
    small = isinstance(value, Tensor) and value.device.type == "cpu" and not Batch.is_large(value)
    return value.numpy() if small else value
