"""Ranks from the environment, and a group of one without a launcher. Several ranks are tested in tests/multi."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lavis_ds import distributed
from lavis_ds.errors import ConfigError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher() -> Iterator[None]:
    """Neither what a launcher sets nor a process group, before and after."""
    before = {name: os.environ.pop(name, None) for name in NAMES}
    threads = torch.get_num_threads()
    yield
    distributed.shutdown()
    torch.set_num_threads(threads)
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in before.items() if value is not None})


def test_without_a_launcher_there_is_one_rank() -> None:
    found = distributed.global_rank(), distributed.local_rank(), distributed.world_size(), distributed.is_main()
    assert found == (0, 0, 1, True)
    assert distributed.local_world_size() == 1


def test_ranks_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    found = distributed.global_rank(), distributed.local_rank(), distributed.world_size(), distributed.is_main()
    assert found == (5, 1, 8, False)
    assert distributed.local_world_size() == 4


@pytest.mark.parametrize(("name", "size"), [("LOCAL_SIZE", 2), (None, 8)])
def test_ranks_of_a_machine_under_other_launchers(name: str | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    if name:
        monkeypatch.setenv(name, "2")
    assert distributed.local_world_size() == size


def test_a_single_process_forms_a_group_of_one_and_leaves_it() -> None:
    distributed.initialize(30)
    assert dist.is_initialized()
    assert (dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]) == (1, "0", "1")
    distributed.initialize(30)  # a second time changes nothing
    distributed.shutdown()
    assert not dist.is_initialized()
    distributed.shutdown()


def test_collectives_of_one_rank_need_no_group() -> None:
    distributed.barrier()
    assert distributed.sum_over_ranks([1, 2.5]) == [1, 2.5]
    sums = distributed.RankSums([1, torch.tensor(2.5, requires_grad=True), 2**40 + 1])
    assert sums.tolist() == [1.0, 2.5, 2**40 + 1]
    assert float(sums.on_device(1)) == 2.5
    value = object()
    assert distributed.broadcast_object(value) is value
    assert distributed.gather_objects(value) == [value]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:561] Connection closed by peer [10.0.0.2]:34436. This is typically ..."), True),
        (RuntimeError("[pair.cc:545] Read error [127.0.0.1]:896: Connection reset by peer"), True),
        (dist.DistBackendError("NCCL error ... remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("Connection reset by peer"), False),  # of a file system or the network, not of a rank
    ],
)
def test_loss_of_a_rank(error: Exception, lost: bool) -> None:
    assert distributed.is_loss_of_a_rank(error) == lost


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"local rank 3 has no GPU.*4 ranks on a machine with 2 GPUs"):
        distributed.initialize(30)
    assert not dist.is_initialized()
