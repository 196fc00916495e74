from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.batch import Batch, Sample
from lavis_ds.data.collate import Collator
from lavis_ds.data.configs import ImageTrainConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.dataset import EncodedDataset, Opened, Source
from lavis_ds.data.loader import BatchLoader, StepLoader
from lavis_ds.data.order import SampleKey, SampleOrder
from lavis_ds.data.plan import PlainRows, StepPlan
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageTrain
from lavis_ds.errors import DataError

COLLATOR = Collator(0, (3, 4, 4), tokens_per_image=3, datasets=["noise"])


@pytest.fixture
def dataset(picture_folder: Path, chat: Callable[..., Chat]) -> EncodedDataset:
    """Ten samples with random crops and texts of different length."""
    conversations = []
    for number in range(10):
        question = Turn("user", (Image(str(picture_folder / f"{number}.png")), Text("what? " * number)))
        conversations.append(Conversation(f"train/{number}", (question, Turn("assistant", (Text("noise"),)))))
    return EncodedDataset([Source("noise", conversations, ImageTrain(ImageTrainConfig(image_size=4)), chat())], seed=3)


def plan(dataset: EncodedDataset, total: int = 23, ranks: int = 1, micro: int = 2, rank: int = 0) -> StepPlan:
    return StepPlan(PlainRows(SampleOrder(dataset.sizes, seed=5), 4, total), micro, ranks, rank)


def loader(
    dataset: EncodedDataset,
    start: int = 0,
    steps: int = 6,
    num_workers: int = 0,
    timeout_s: int = 60,
    **options: Any,
) -> StepLoader:
    steps_of = plan(dataset, **options)
    batches = BatchLoader(dataset, steps_of, COLLATOR, range(start, start + steps), num_workers, False, timeout_s)
    return StepLoader(batches, steps_of.accumulation)


def assert_equal(left: Iterable[Batch], right: Iterable[Batch]) -> None:
    for a, b in zip(left, right, strict=True):
        for field in fields(Batch):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, field.name


def flat(steps: Iterable[list[Batch]]) -> list[Batch]:
    return [batch for step in steps for batch in step]


def test_a_step_is_a_list_of_the_micro_batches_of_the_plan(dataset: EncodedDataset) -> None:
    steps = list(loader(dataset))
    assert [len(step) for step in steps] == [2] * 6
    assert {batch.shape[0] for batch in flat(steps)} == {2}
    order = SampleOrder(dataset.sizes, seed=5)
    expected = [f"noise/train/{order.at(position).index}" for position in range(23)]
    assert [i for batch in flat(steps) for i in batch.sample_ids] == expected
    assert [batch.num_samples for batch in steps[-1]] == [2, 1]


def test_seeking_to_a_step_equals_skipping_to_it(dataset: EncodedDataset) -> None:
    assert_equal(flat(list(loader(dataset))[2:]), flat(loader(dataset, start=2, steps=4)))


def test_two_workers_give_the_batches_of_none(dataset: EncodedDataset) -> None:
    workers = loader(dataset, start=1, steps=5, num_workers=2)
    assert_equal(flat(loader(dataset, start=1, steps=5)), flat(workers))


def test_ranks_together_read_what_one_rank_reads(dataset: EncodedDataset) -> None:
    alone = [{i for batch in step for i in batch.sample_ids} for step in loader(dataset)]
    pair = [list(loader(dataset, ranks=2, micro=1, rank=rank)) for rank in range(2)]
    together = [
        {i for batch in (*first, *second) for i in batch.sample_ids} for first, second in zip(*pair, strict=True)
    ]
    assert together == alone


def test_starting_a_loader_leaves_the_global_random_state_alone(dataset: EncodedDataset) -> None:
    before = torch.get_rng_state()
    next(loader(dataset))
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_reads_everything_once(dataset: EncodedDataset) -> None:
    steps = StepPlan.for_evaluation(dataset.sizes, 4, 1, 0)
    read = list(BatchLoader(dataset, steps, COLLATOR, range(steps.num_steps), 0, False, 60))
    assert [i for batch in read for i in batch.sample_ids] == [f"noise/train/{i}" for i in range(10)]
    assert [batch.num_samples for batch in read] == [4, 4, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unusable_sample_leaves_its_place_empty_in_any_process(
    dataset: EncodedDataset, picture_folder: Path, num_workers: int
) -> None:
    whole = flat(loader(dataset, num_workers=num_workers))
    (picture_folder / "7.png").write_text("not a picture")
    read = flat(loader(dataset, num_workers=num_workers))
    assert [i for b in read for i in b.sample_ids] == [i for b in whole for i in b.sample_ids if i != "noise/train/7"]
    (first, *others) = [sample for batch in read for sample in batch.unusable]
    assert (first.id, first.source) == ("noise/train/7", str(picture_folder / "7.png"))
    assert first.reason.startswith(f"noise/train/7 ({first.source}): the image can't be read")
    assert all(sample == first for sample in others)
    assert all(batch.shape[0] == 2 and batch.num_samples + len(batch.unusable) <= 2 for batch in read)


def test_a_sample_that_does_not_fit_the_model_is_unusable_too(dataset: EncodedDataset) -> None:
    steps = plan(dataset)
    collator = Collator(0, (3, 8, 8), tokens_per_image=3, datasets=["noise"])
    batch = next(BatchLoader(dataset, steps, collator, range(1), 0, False, 60))
    assert batch.num_samples == 0
    assert {"another size than the model's" in sample.reason for sample in batch.unusable} == {True}


class Stuck(EncodedDataset):
    """Sample 7 never comes."""

    def open(self, key: SampleKey) -> Opened:
        if key.index == 7:
            time.sleep(3600)
        return super().open(key)


def test_a_worker_that_hangs_is_named_with_its_sample_and_ended(dataset: EncodedDataset) -> None:
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        list(loader(Stuck(dataset.sources, seed=3), num_workers=2, timeout_s=2))
    text = str(caught.value)
    assert "at sample noise[7] for " in text
    assert "no batch came from the data-loading processes for 2 s" in text
    assert time.monotonic() - started < 30
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_worker_that_crashes_is_named_with_its_sample(dataset: EncodedDataset) -> None:
    class Crashing(EncodedDataset):
        def encode(self, opened: Opened) -> Sample:
            if opened.key.index == 7:
                os.kill(os.getpid(), signal.SIGSEGV)
            return super().encode(opened)

    with pytest.raises(DataError, match=r"worker 0 \(dead, exit code -11\) at sample noise\[7\]"):
        list(loader(Crashing(dataset.sources, seed=3), num_workers=1))


def test_a_killed_worker_is_a_clear_error_of_the_next_batch(dataset: EncodedDataset) -> None:
    running = loader(dataset, steps=200, num_workers=1, total=1000)
    next(running)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.3)  # here PyTorch's own handler would raise
    with pytest.raises(
        DataError, match=r"worker 0 \(dead, exit code -9\).*a data-loading process died.*run\.num_workers"
    ):
        list(running)
    gc.collect()
    assert multiprocessing.active_children() == []


def test_workers_survive_the_signals_that_ask_the_trainer_to_stop(dataset: EncodedDataset) -> None:
    running = loader(dataset, steps=30, num_workers=1, total=1000)
    next(running)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(worker.pid, signal.SIGINT)
    time.sleep(0.2)
    assert len(list(running)) == 29


@pytest.mark.parametrize("way", ["close", "forget"])
def test_closed_and_forgotten_loaders_leave_no_workers(dataset: EncodedDataset, way: str) -> None:
    running = loader(dataset, steps=200, num_workers=2, total=1000)
    next(running)
    assert len(multiprocessing.active_children()) == 2
    if way == "close":
        running.close()
        assert list(running) == []
    del running
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_program_that_ends_with_an_open_loader_does_not_hang() -> None:
    """Its workers ignore the SIGTERM by which PyTorch and multiprocessing would end them."""
    program = """
        from lavis_ds.data.collate import Collator
        from lavis_ds.data.dataset import EncodedDataset, Opened
        from lavis_ds.data.loader import BatchLoader
        from lavis_ds.data.order import SampleOrder
        from lavis_ds.data.plan import PlainRows, StepPlan
        from lavis_ds.batch import Sample
        import torch

        class Dataset(EncodedDataset):
            def open(self, key):
                return Opened(key, None, [], None)

            def encode(self, opened):
                ids = torch.arange(5)
                images = torch.empty((0, 3, 0, 0), dtype=torch.uint8)
                return Sample("x", ids, torch.full_like(ids, -100), ids, images, torch.empty(0, dtype=torch.int64))

        plan = StepPlan(PlainRows(SampleOrder([1000], seed=0), 1, 1000), 1, 1, 0)
        collator = Collator(0, None, tokens_per_image=0, datasets=["x"])
        open_loader = BatchLoader(Dataset([], seed=0), plan, collator, range(1000), 2, False, 60)
        next(open_loader)
        raise SystemExit(7)
    """
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=Path(__file__).parents[3], timeout=120, check=False
    )
    assert ended.returncode == 7
    assert time.monotonic() - started < 100
