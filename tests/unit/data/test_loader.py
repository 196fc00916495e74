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

from lavis_ds.batch import Batch
from lavis_ds.data.collate import Collator
from lavis_ds.data.configs import ImageTrainConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.loader import StepLoader, eval_loader, train_loader
from lavis_ds.data.order import SampleOrder, StepPlan
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageTrain
from lavis_ds.errors import DataError

COLLATOR = Collator(0, (3, 4, 4), tokens_per_image=3)


@pytest.fixture
def dataset(picture_folder: Path, chat: Callable[..., Chat]) -> EncodedDataset:
    """Ten samples with random crops and texts of different length."""
    conversations = []
    for number in range(10):
        question = Turn("user", (Image(str(picture_folder / f"{number}.png")), Text("what? " * number)))
        conversations.append(Conversation(f"train/{number}", (question, Turn("assistant", (Text("noise"),)))))
    return EncodedDataset([Source("noise", conversations, ImageTrain(ImageTrainConfig(image_size=4)), chat())], seed=3)


def plan(dataset: EncodedDataset, total: int = 23, ranks: int = 1, micro: int = 2, rank: int = 0) -> StepPlan:
    return StepPlan(SampleOrder(dataset.sizes, seed=5), 4, micro, ranks, rank, total)


def loader(dataset: EncodedDataset, start: int = 0, steps: int = 6, num_workers: int = 0, **options: Any) -> StepLoader:
    return train_loader(dataset, plan(dataset, **options), COLLATOR, start, steps, num_workers, pin_memory=False)


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
    batches = eval_loader(
        dataset, StepPlan.for_evaluation(dataset.sizes, 4, 1, 0), COLLATOR, num_workers=0, pin_memory=False
    )
    read = list(batches)
    assert [i for batch in read for i in batch.sample_ids] == [f"noise/train/{i}" for i in range(10)]
    assert [batch.num_samples for batch in read] == [4, 4, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_is_one_clear_error_in_any_process(
    dataset: EncodedDataset, picture_folder: Path, num_workers: int
) -> None:
    (picture_folder / "7.png").write_text("not a picture")
    with pytest.raises(DataError) as caught:
        list(loader(dataset, num_workers=num_workers))
    assert str(caught.value).startswith(f"noise/train/7 ({picture_folder / '7.png'}): the image can't be read")
    assert "Traceback" not in str(caught.value)


def test_a_killed_worker_is_a_clear_error_of_the_next_batch(dataset: EncodedDataset) -> None:
    running = loader(dataset, steps=200, num_workers=1, total=1000)
    next(running)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.3)  # here PyTorch's own handler would raise
    with pytest.raises(DataError, match=r"a data-loading process died.*run\.num_workers"):
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
        from lavis_ds.data.dataset import EncodedDataset
        from lavis_ds.data.loader import train_loader
        from lavis_ds.data.order import SampleOrder, StepPlan
        from lavis_ds.batch import Sample
        import torch

        class Dataset(EncodedDataset):
            def __getitem__(self, key):
                ids = torch.arange(5)
                images = torch.empty((0, 3, 0, 0), dtype=torch.uint8)
                return Sample("x", ids, torch.full_like(ids, -100), ids, images, torch.empty(0, dtype=torch.int64))

        order = SampleOrder([1000], seed=0)
        plan = StepPlan(order, 1, 1, 1, 0, 1000)
        open_loader = train_loader(Dataset([], seed=0), plan, Collator(0, None, tokens_per_image=0), 0, 1000, 2, False)
        next(open_loader)
        raise SystemExit(7)
    """
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=Path(__file__).parents[3], timeout=120, check=False
    )
    assert ended.returncode == 7
    assert time.monotonic() - started < 100
