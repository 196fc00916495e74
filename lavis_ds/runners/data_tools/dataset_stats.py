"""Numbers of each dataset: tokens, pictures, targets, its share of an epoch, and samples that can't be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import SampleOrder
from lavis_ds.errors import DataError

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_MOST_BINS = 16
_NUM_PROBED = 500
_NUM_REASONS = 5


@dataclass(frozen=True)
class Histogram:
    """Bin `i` counts the samples of `edges[i]` to `edges[i + 1] - 1` tokens."""

    edges: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Probe:
    """What only encoding tells, of some samples, evenly spread.

    Attributes:
        num_samples: how many of the samples looked at can be used.
        target_fraction: share of their tokens that are targets.
        dropped_fraction: share of them that have turns left out or cut because they were too long.
    """

    num_samples: int
    target_fraction: float
    dropped_fraction: float


@dataclass(frozen=True)
class DatasetStats:
    """One dataset. Tokens and views are those of the samples that can be used.

    Attributes:
        name: its entry.
        num_samples: all of its samples.
        num_unusable: those too long or otherwise wrong, as far as that shows without opening pictures.
        reasons: why, of the first of them.
        tokens: of all samples together, image tokens included.
        mean_tokens: of a sample.
        percentiles: `PERCENTILES` -> tokens of a sample.
        histogram: of a sample's tokens.
        mean_views: views of pictures (one a picture, unless it is cut into tiles) in a sample.
        max_views: most of them in a sample.
        without_views_fraction: share of the samples without pictures.
        samples_an_epoch: what it gives to an epoch of the run.
        sample_share: that, as a share of all datasets'.
        token_share: the same by tokens.
        probe: None where no sample can be used.
    """

    name: str
    num_samples: int
    num_unusable: int
    reasons: list[str]
    tokens: int
    mean_tokens: float
    percentiles: dict[int, int]
    histogram: Histogram
    mean_views: float
    max_views: int
    without_views_fraction: float
    samples_an_epoch: int
    sample_share: float
    token_share: float
    probe: Probe | None


def describe(data: EncodedDataset, counts: TokenCounts, order: SampleOrder) -> list[DatasetStats]:
    """The numbers of every dataset, in their order."""
    means = [float(of[of[:, 0] > 0, 0].mean()) if (of[:, 0] > 0).any() else 0.0 for of in counts.of]
    usable = [float((of[:, 0] > 0).mean()) if len(of) else 0.0 for of in counts.of]
    tokens = [quota * mean * share for quota, mean, share in zip(order.quotas, means, usable, strict=True)]
    shares = [own / (sum(tokens) or 1) for own in tokens]
    return [_describe(data, counts, order, number, shares[number]) for number in range(len(counts.of))]


def _describe(
    data: EncodedDataset, counts: TokenCounts, order: SampleOrder, number: int, token_share: float
) -> DatasetStats:
    of = counts.of[number]
    unusable, usable = np.flatnonzero(of[:, 0] == 0), np.flatnonzero(of[:, 0])
    tokens, views = of[usable, 0], of[usable, 1]
    return DatasetStats(
        name=data.sources[number].name,
        num_samples=len(of),
        num_unusable=len(unusable),
        reasons=_reasons(data, number, unusable[:_NUM_REASONS].tolist()),
        tokens=int(tokens.sum(dtype=np.int64)),
        mean_tokens=_mean(tokens),
        percentiles={p: _percentile(tokens, p) for p in PERCENTILES},
        histogram=histogram(tokens),
        mean_views=_mean(views),
        max_views=int(views.max(initial=0)),
        without_views_fraction=_mean(views == 0),
        samples_an_epoch=order.quotas[number],
        sample_share=order.quotas[number] / order.total,
        token_share=token_share,
        probe=_probe(data, number, usable),
    )


def histogram(tokens: NDArray[np.int32]) -> Histogram:
    """Up to 16 bins of a round width."""
    if not len(tokens):
        return Histogram([0], [])
    low, high = int(tokens.min()), int(tokens.max())
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    width = next(step for step in steps if high // step - low // step < _MOST_BINS)
    edges = np.arange(low // width, high // width + 2) * width
    return Histogram(edges.tolist(), np.bincount(tokens // width - low // width).tolist())


def _mean(values: NDArray[np.int32] | NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentile(tokens: NDArray[np.int32], p: int) -> int:
    return int(np.percentile(tokens, p, method="inverted_cdf")) if len(tokens) else 0


def _reasons(data: EncodedDataset, number: int, indices: Sequence[int]) -> list[str]:
    """What is wrong with samples that counted no tokens, by encoding them again."""
    reasons = []
    for index in indices:
        try:
            data.without_pixels(number, index)
        except DataError as error:
            reasons.append(str(error))
    return reasons


def _probe(data: EncodedDataset, number: int, usable: NDArray[np.int64]) -> Probe | None:
    if not len(usable):
        return None
    chosen = np.unique(np.linspace(0, len(usable) - 1, min(len(usable), _NUM_PROBED)).astype(int))
    samples = [data.without_pixels(number, int(index)) for index in usable[chosen]]
    targets = sum(int((sample.labels != IGNORE_INDEX).sum()) for sample in samples)
    dropped = sum(sample.num_dropped_turns > 0 for sample in samples)
    return Probe(len(samples), targets / sum(len(sample.input_ids) for sample in samples), dropped / len(samples))
