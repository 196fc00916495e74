"""Ranks and the few collectives the loop needs. Works the same under every launcher, and under none."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lavis_ds.errors import ConfigError
from lavis_ds.on_host import OnHost

ObjectT = TypeVar("ObjectT")

# In the words of gloo, NCCL and the store.
_LOSS = re.compile(r"(closed|reset) by peer|Broken pipe|remote process exited|Failed to recv|Connection refused")


def global_rank() -> int:
    """Rank among all processes, known before anything is initialised."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size())


def is_main() -> bool:
    return global_rank() == 0


def device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def initialize(timeout_s: int) -> None:
    """Join the process group (NCCL on GPUs, gloo on CPUs). A single process without a launcher forms a group of one.

    Args:
        timeout_s: seconds after which a collective that a rank did not join ends the run.

    Raises:
        ConfigError: more ranks than GPUs on this machine.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
        )
    if torch.cuda.is_available():
        if local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank()} has no GPU of its own.",
                given=f"{local_world_size()} ranks on a machine with {torch.cuda.device_count()} GPUs",
                hint="Start as many ranks as there are GPUs (--num_gpus, --nproc_per_node). Under SLURM ask with "
                "--gpus-per-node: with --gpus-per-task each rank sees one GPU only.",
            )
        torch.cuda.set_device(local_rank())
    elif "OMP_NUM_THREADS" not in os.environ:  # else the user, or torchrun, has decided
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size()))
    backend, device_id = ("nccl", device()) if torch.cuda.is_available() else ("gloo", None)
    timeout, store = timedelta(seconds=timeout_s), _store_of_this_attempt()
    place = (-1, -1) if store is None else (world_size(), global_rank())  # read from the environment without a store
    dist.init_process_group(backend, None, timeout, *place, store, device_id=device_id)


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


class RankSums:
    """Element-wise sums over all ranks, in float64, so that counts stay exact.

    On GPUs nothing waits for them but who reads them: the host for what was queued when they were asked for, and not
    for what was queued since; the device where `on_device` is called.

    Args:
        values: numbers, and scalars on this rank's device; as many on all ranks.
    """

    def __init__(self, values: Sequence[float | Tensor]) -> None:
        self._sums = _vector(values)
        self._work: Any = None
        if world_size() > 1 and self._sums.is_cuda:
            self._work = dist.all_reduce(self._sums, async_op=True)
            with torch.cuda.stream(_side_stream()):
                self._work.wait()  # on the GPU: this stream for NCCL's
                self._on_host = OnHost(self._sums)
            return
        if world_size() > 1:
            dist.all_reduce(self._sums)
        self._on_host = OnHost(self._sums)

    def on_device(self, index: int) -> Tensor:
        """One of them, a scalar on this rank's device."""
        if self._work is not None:
            self._work.wait()
        return self._sums[index]

    def tolist(self) -> list[float]:
        """All of them."""
        return [float(value) for value in self._on_host.tensor().tolist()]


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise sums over all ranks, in float64, so that counts stay exact."""
    return list(values) if world_size() == 1 else RankSums(values).tolist()


def _vector(values: Sequence[float | Tensor]) -> Tensor:
    """(values,) float64, on the CPU unless a rank's GPU must add them up or has some of them."""
    numbers = torch.tensor([0.0 if isinstance(v, Tensor) else v for v in values], dtype=torch.float64)
    scalars = [value for value in values if isinstance(value, Tensor)]
    if world_size() > 1 or any(scalar.is_cuda for scalar in scalars):
        numbers = numbers.pin_memory().to(device(), non_blocking=True) if torch.cuda.is_available() else numbers
    if not scalars:
        return numbers
    pairs = zip(values, numbers.unbind(), strict=True)
    return torch.stack([value.detach().double() if isinstance(value, Tensor) else number for value, number in pairs])


@cache
def _side_stream() -> torch.cuda.Stream:
    """Of this rank's GPU, for what the stream of the model must not wait for."""
    return torch.cuda.Stream(device())  # type: ignore[no-untyped-call]


def is_loss_of_a_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended, whose own error is the one to read."""
    return isinstance(error, RuntimeError) and _LOSS.search(str(error)) is not None


def broadcast_object(value: ObjectT) -> ObjectT:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def gather_objects(value: ObjectT) -> list[ObjectT]:
    """Every rank's value, by rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[ObjectT | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def gather_pieces(piece: torch.Tensor, on: torch.device) -> torch.Tensor:
    """All ranks' pieces end to end, by rank, on the device `on`. They are flat, and of one length and type."""
    if world_size() == 1:
        return piece.to(on)
    own = piece.to(device()).view(torch.uint8)  # bytes, since gloo lacks some types
    gathered = torch.empty(world_size() * own.numel(), dtype=torch.uint8, device=own.device)
    dist.all_gather_into_tensor(gathered, own)
    return gathered.view(piece.dtype).to(on)


def _store_of_this_attempt() -> Any:
    """A part of torchrun's store that earlier attempts have not seen, where it has started the ranks again; else None.

    torchrun keeps one store for all attempts. With torch 2.14 the addresses of dead ranks remain there, and the living
    wait for them for ever as soon as they form a second group.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"attempt_{attempt}", store)  # type: ignore[attr-defined]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
