"""The numbers of one optimizer step, summed over micro-batches and ranks in one collective."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.models.work import Amount
from lavis_ds.runners.speed import Speed
from lavis_ds.tasks.base import StepOutput


class GroupSums:
    """Counts of the micro-batches that make one optimizer step, on their way to becoming `GroupCounts`.

    Args:
        group: this rank's micro-batches.
        stop: whether this rank was asked to stop.
        save: whether this rank wants a checkpoint after the step.
        is_writing: whether this rank still writes a checkpoint.
    """

    def __init__(self, group: Sequence[Batch], *, stop: bool, save: bool = False, is_writing: bool = False) -> None:
        local = [
            sum(b.target_weight for b in group),
            sum(b.num_targets for b in group),
            sum(b.num_tokens for b in group),
            sum(b.num_samples for b in group),
            sum(b.shape[0] * b.shape[1] for b in group),
            float(stop),
            float(save),
            float(is_writing),
            sum(len(b.unusable) for b in group),
            sum(b.num_dropped_turns for b in group),
            sum(b.num_pairs for b in group),
            sum(_num_views(b) for b in group),
            sum(_num_view_pairs(b) for b in group),
        ]
        self._names = [counts.name for counts in group[0].by_dataset]
        for number in range(len(self._names)):
            local += [sum(b.by_dataset[number].num_samples for b in group)]
            local += [sum(b.by_dataset[number].num_tokens for b in group)]
        self._sums = distributed.RankSums(local)

    def loss_factor(self, num_ranks: int) -> float | Tensor:
        """What a rank's sum of losses is multiplied by, if gradients are then averaged over so many ranks.

        A scalar on the GPU where it takes other ranks to know.
        """
        weight = self._sums.on_device(0)
        if not weight.is_cuda:
            return num_ranks / (float(weight) or 1.0)
        return (num_ranks / torch.where(weight == 0, 1.0, weight)).float()

    def read(self) -> GroupCounts:
        """The counts of all ranks."""
        return GroupCounts(self._sums.tolist(), self._names)


class GroupCounts:
    """Counts of the micro-batches that make one optimizer step, over all ranks.

    Args:
        sums: what `GroupSums` adds up.
        names: of the data sets.

    Attributes:
        divisor: of the sum of all losses.
        stop: a rank was asked to stop.
        save: a rank wants a checkpoint after the step.
        is_writing: a rank still writes a checkpoint.
    """

    def __init__(self, sums: Iterable[float], names: Sequence[str]) -> None:
        totals = iter(sums)
        weight, targets, tokens, samples, slots, stops, saves, writing, unusable, dropped = islice(totals, 10)
        self.amount = Amount(tokens, next(totals), targets, next(totals), next(totals))
        rest = list(totals)
        self.divisor = weight or 1.0  # a step of unusable samples only has no loss to divide
        self.targets, self.tokens, self.samples = int(targets), int(tokens), int(samples)
        self.unusable, self.dropped_turns = int(unusable), int(dropped)
        self.padding_fraction = 1.0 - tokens / slots
        self.stop, self.save, self.is_writing = stops > 0, saves > 0, writing > 0
        self.by_dataset = {name: (int(rest[2 * i]), int(rest[2 * i + 1])) for i, name in enumerate(names)}

    def metrics(self) -> dict[str, float]:
        """What `metrics.jsonl` says about the step's data."""
        shares = {
            key: value
            for name, (samples, tokens) in self.by_dataset.items()
            for key, value in ((f"data/samples/{name}", samples), (f"data/tokens/{name}", tokens))
        }
        return {
            "data/padding_fraction": self.padding_fraction,
            "data/unusable_samples": self.unusable,
            "data/dropped_turns": self.dropped_turns,
            **(shares if len(self.by_dataset) > 1 else {}),
        }


def _num_views(batch: Batch) -> int:
    """Pictures or patches that fill places; the blank one of a batch without pictures does not."""
    return 0 if batch.images is None or not batch.image_index.numel() else len(batch.images)


def _num_view_pairs(batch: Batch) -> int:
    if batch.image_grids is None or not batch.image_index.numel():
        return 0
    return sum(steps * (height * width) ** 2 for steps, height, width in batch.image_grids.tolist())


class OutputSums:
    """What the micro-batches of one optimizer step gave, on its way to being summed over them and over ranks.

    Args:
        outputs: this rank's. Made before the last backward pass, they need not wait for that.
    """

    def __init__(self, outputs: Sequence[StepOutput]) -> None:
        self._names = sorted({name for output in outputs for name in output.metrics})
        values = [_sum(output.loss_sum for output in outputs)]
        for name in self._names:
            pairs = [output.metrics.get(name, (0.0, 0.0)) for output in outputs]
            values += [_sum(total for total, _ in pairs), sum(float(count) for _, count in pairs)]
        self._sums = distributed.RankSums(values)

    def read(self) -> tuple[float, dict[str, float]]:
        """Sum of the losses, and the means of all other metrics."""
        loss, *rest = self._sums.tolist()
        pairs = zip(self._names, rest[::2], rest[1::2], strict=True)
        return loss, {name: total / count for name, total, count in pairs if count}


def _sum(values: Iterable[Tensor | float]) -> Tensor | float:
    """In float64."""
    return sum(value.double() if isinstance(value, Tensor) else value for value in values)


def suspects(group: Sequence[Batch], outputs: Sequence[StepOutput]) -> tuple[list[int], list[str]]:
    """Ranks whose own loss is not finite, or all where none is, and their samples. Called on all ranks."""
    is_bad = not all(math.isfinite(output.loss_sum) for output in outputs)
    answers = distributed.gather_objects((is_bad, [name for batch in group for name in batch.sample_ids]))
    ranks = [rank for rank, (bad, _) in enumerate(answers) if bad] or list(range(len(answers)))
    return ranks, [name for rank in ranks for name in answers[rank][1]]


class StepTimer:
    """Seconds of a step and of the part of it spent waiting for data.

    Args:
        speed: what the model's operations make of them.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._start = time.perf_counter()
        self._data = 0.0

    def data_arrived(self) -> None:
        self._data = time.perf_counter() - self._start

    def restart(self) -> None:
        """The next step starts now; what came before (an evaluation, a checkpoint) is not its time."""
        self._start = time.perf_counter()

    def finish(self, counts: GroupCounts) -> Mapping[str, float]:
        """The step's times and rates; the next step starts now."""
        now = time.perf_counter()
        step_s = now - self._start
        self._start = now
        return {
            "time/step_s": step_s,
            "time/data_s": self._data,
            "throughput/tokens_per_s": counts.tokens / step_s,
            "throughput/samples_per_s": counts.samples / step_s,
            **self._speed.metrics(counts.amount, step_s),
        }


def peak_memory_bytes() -> int:
    """Largest memory held so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
