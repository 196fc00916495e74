"""Counts, means and times of one optimizer step."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from lavis_ds.batch import Batch, DatasetCounts, Unusable
from lavis_ds.models.work import Amount, Work
from lavis_ds.runners import meter, speed
from lavis_ds.runners.meter import GroupSums, OutputSums, StepTimer
from lavis_ds.runners.speed import Speed
from lavis_ds.tasks.base import StepOutput


def batch(rows: int, width: int, targets: int, tokens: int, samples: int) -> Batch:
    ids = torch.zeros(rows, width, dtype=torch.int64)
    return Batch(
        input_ids=ids, labels=ids, position_ids=ids, attention_mask=ids == 0, images=None, image_index=ids[0],
        target_index=ids[0], num_targets=targets, target_weight=targets / 2, num_tokens=tokens,
        sample_ids=("s",) * samples, positions=(), by_dataset=(DatasetCounts("d", samples, tokens, targets),),
    )  # fmt: skip


GROUP = [batch(2, 8, targets=5, tokens=12, samples=2), batch(2, 16, targets=7, tokens=12, samples=1)]


def test_counts_are_sums_over_micro_batches() -> None:
    counts = GroupSums(GROUP, stop=False).read()
    assert (counts.targets, counts.tokens, counts.samples, counts.stop) == (12, 24, 3, False)
    assert counts.padding_fraction == pytest.approx(1 - 24 / 48)


class Sums:
    """Of two ranks; `other` is what the other one has."""

    other: list[float]
    asked: ClassVar[list[list[float]]] = []

    def __init__(self, values: list[float]) -> None:
        self.asked.append([float(value) for value in values])
        self._sums = [a + b for a, b in zip(self.asked[-1], self.other, strict=True)]

    def on_device(self, index: int) -> torch.Tensor:
        return torch.tensor(self._sums[index])

    def tolist(self) -> list[float]:
        return self._sums


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> type[Sums]:
    monkeypatch.setattr(meter.distributed, "RankSums", Sums)
    Sums.asked.clear()
    return Sums


def test_counts_are_sums_over_ranks_in_one_collective(two_ranks: type[Sums]) -> None:
    two_ranks.other = [4, 8, 6, 5, 52, 1, 0, 1, 2, 3, 7, 8, 9, 5, 6]  # the other rank was asked to stop
    sums = GroupSums(GROUP, stop=False, save=True)
    counts = sums.read()
    assert (counts.targets, counts.tokens, counts.samples) == (20, 30, 8)
    assert (counts.stop, counts.save, counts.is_writing) == (True, True, True)
    assert counts.padding_fraction == pytest.approx(0.7)
    assert (counts.divisor, counts.unusable, counts.dropped_turns, counts.by_dataset) == (10, 2, 3, {"d": (8, 30)})
    assert sums.loss_factor(2) == 2 / 10
    assert two_ranks.asked == [[6, 12, 24, 3, 48, 0, 1, 0, 0, 0, 0, 0, 0, 3, 24]]
    assert counts.amount == Amount(30, 7, 20, 8, 9)


def test_a_step_of_unusable_samples_only_divides_by_one() -> None:
    empty = replace(GROUP[0], target_weight=0.0, unusable=(Unusable("a", None, "broken"),))
    sums = GroupSums([empty], stop=False)
    counts = sums.read()
    assert sums.loss_factor(1) == 1.0
    assert (counts.divisor, counts.metrics()["data/unusable_samples"]) == (1.0, 1)


def test_shares_of_datasets_are_told_where_there_are_several() -> None:
    two = replace(GROUP[0], by_dataset=(DatasetCounts("a", 2, 9, 3.0), DatasetCounts("b")))
    assert "data/samples/d" not in GroupSums(GROUP, stop=False).read().metrics()
    metrics = GroupSums([two], stop=False).read().metrics()
    assert {key: metrics[key] for key in metrics if "/a" in key or "/b" in key} == {
        "data/samples/a": 2,
        "data/tokens/a": 9,
        "data/samples/b": 0,
        "data/tokens/b": 0,
    }


def test_this_rank_was_asked_to_stop() -> None:
    assert GroupSums(GROUP, stop=True).read().stop


def test_metrics_are_means_over_what_they_count_not_means_of_means() -> None:
    outputs = [
        StepOutput(torch.tensor(6.0), {"accuracy": (torch.tensor(3.0), 3), "only_here": (1.0, 4)}),
        StepOutput(torch.tensor(2.0), {"accuracy": (torch.tensor(0.0), 1), "nothing": (0.0, 0)}),
    ]
    assert OutputSums(outputs).read() == (8.0, {"accuracy": 0.75, "only_here": 0.25})


def test_outputs_are_summed_over_ranks_in_one_collective(two_ranks: type[Sums]) -> None:
    two_ranks.other = [6.0, 3.0, 4, 2.0, 4]
    sums = OutputSums([StepOutput(torch.tensor(6.0), {"a": (1.0, 4), "b": (torch.tensor(2.0), 4)})])
    assert sums.read() == (12.0, {"a": 0.5, "b": 0.5})
    assert two_ranks.asked == [[6.0, 1.0, 4, 2.0, 4]]


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 14.0, 20.0, 20.5, 22.0])
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(clock))
    counts = GroupSums([replace(GROUP[0], num_tokens=40, sample_ids=("s",) * 8)], stop=False).read()
    timer = StepTimer(Speed(Work(), "fp32"))  # 10
    timer.data_arrived()  # 11
    assert timer.finish(counts) == {  # 14
        "time/step_s": 4.0,
        "time/data_s": 1.0,
        "throughput/tokens_per_s": 10.0,
        "throughput/samples_per_s": 2.0,
    }
    timer.restart()  # 20: what came before was an evaluation
    timer.data_arrived()  # 20.5
    times = timer.finish(counts)  # 22
    assert (times["time/step_s"], times["time/data_s"]) == (2.0, 0.5)


def test_peak_memory_is_in_bytes() -> None:
    assert meter.peak_memory_bytes() > 50 * 2**20  # torch alone takes more


def test_operations_of_a_step() -> None:
    """Of a picture of 2 x (2 x 3) patches, and of none where the picture is the blank one."""
    batch = replace(
        GROUP[0],
        num_tokens=10,
        num_pairs=50.0,
        num_targets=3,
        images=torch.zeros(12, 4, dtype=torch.uint8),
        image_grids=torch.tensor([[2, 2, 3]]),
        image_index=torch.arange(3),
    )
    blank = replace(batch, image_index=torch.arange(0))
    assert GroupSums([batch], stop=False).read().amount == Amount(10, 50, 3, 12, 72)
    assert GroupSums([batch, blank], stop=False).read().amount == Amount(20, 100, 6, 12, 72)


def test_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(per_token=1e12, in_flops=True)
    monkeypatch.setattr(speed, "_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(speed.distributed, "world_size", lambda: 2)
    found = Speed(work, "bf16").metrics(Amount(tokens=989), 2.0)
    assert found == {"throughput/tflops": 989 / 4, "throughput/mfu": 0.25}
    assert Speed(work, "fp32").metrics(Amount(tokens=8), 2.0) == {"throughput/tflops": 2.0}
    assert Speed(Work(), "bf16").metrics(Amount(tokens=8), 2.0) == {}
    assert speed.peak_tflops("NVIDIA H100 PCIe") == 756
    assert speed.peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert speed.peak_tflops("some other") is None
