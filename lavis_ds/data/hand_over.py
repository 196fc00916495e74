"""The way of batches from data-loading processes to the trainer: through memory that is used again and again.

PyTorch gives every large tensor a segment of shared memory of its own: a file descriptor sent through a socket, pages
that two processes fault in for one use, and a bus error at the limit of /dev/shm, which containers set to 64 MB. Slots
are mapped before the processes are forked: they have no name and no such limit, and only what is written takes memory.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lavis_ds.batch import Batch

_SLOTS_A_WORKER = 3
"""Two batches are made ahead, which is PyTorch's `prefetch_factor`, while the trainer takes one."""

_SLOT_BYTES = 2**28
_ALIGNMENT = 64


class Slots:
    """Memory that data-loading processes leave batches in.

    Made before the processes, which are forked.

    Args:
        num_workers: their number.
        slot_bytes: a larger batch, one that finds no free slot, and one with small tensors only go the way of PyTorch.
    """

    _all: ClassVar[WeakValueDictionary[int, Slots]] = WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, num_workers: int, slot_bytes: int = _SLOT_BYTES) -> None:
        self.number, self._slot_bytes = next(self._numbers), slot_bytes
        self._all[self.number] = self
        self._memory = [_mapped(_SLOTS_A_WORKER, slot_bytes) for _ in range(num_workers)]
        # Set by the process that fills a slot, and cleared by the trainer; the message between them orders the two.
        flags: Any = torch.zeros(num_workers, _SLOTS_A_WORKER, dtype=torch.bool)
        self._is_taken = flags.share_memory_().numpy()

    def put(self, item: Any) -> Any:
        """What a data-loading process sends in the place of `item`: a `Handed` batch, or the item itself."""
        worker = get_worker_info()
        if not isinstance(item, Batch) or worker is None:
            return item
        tensors = {f.name: t for f in fields(item) if isinstance(t := getattr(item, f.name), Tensor)}
        if not any(map(item.is_large, tensors.values())):
            return item  # inside the message it is there sooner
        places, size = dict[str, _Place](), 0
        for name, tensor in tensors.items():
            places[name] = _Place(tensor.dtype, tuple(tensor.shape), size, size + tensor.nbytes)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        free = [slot for slot in range(len(self._memory[worker.id])) if not self._is_taken[worker.id, slot]]
        if not free or size > self._slot_bytes:
            return item
        memory = self._memory[worker.id][free[0]]
        for name, tensor in tensors.items():
            places[name].of(memory).copy_(tensor)
        self._is_taken[worker.id, free[0]] = True
        nothing: dict[str, Any] = dict.fromkeys(tensors)
        return Handed(self.number, worker.id, free[0], size, replace(item, **nothing), places)

    def take(self, handed: Handed, *, pin: bool = False) -> Batch:
        """The batch, in memory of its own, from one copy; the slot is free then."""
        size = handed.size
        own = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        own.copy_(self._memory[handed.worker][handed.slot][:size])
        self._is_taken[handed.worker, handed.slot] = False
        tensors: dict[str, Any] = {name: place.of(own) for name, place in handed.places.items()}
        return replace(handed.rest, **tensors)

    @classmethod
    def of(cls, handed: Handed) -> Slots:
        """Those that it lies in."""
        return cls._all[handed.slots]


def _mapped(count: int, size: int) -> list[Tensor]:
    """So many slots; none where the kernel promises no memory beyond what there is (`vm.overcommit_memory`)."""
    try:
        return [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(count)]
    except OSError:
        return []


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a slot.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        start: its first byte.
        stop: the byte behind its last one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Handed:
    """A batch whose tensors lie in a slot.

    Attributes:
        slots: number of the `Slots`.
        worker: number of the process.
        slot: of the process's.
        size: bytes used in it.
        rest: the batch without them.
        places: of the tensors, by their names in the batch.
    """

    slots: int
    worker: int
    slot: int
    size: int
    rest: Batch
    places: dict[str, _Place]

    def take(self) -> Batch:
        """The batch; called once."""
        return Slots.of(self).take(self)

    def pin_memory(self) -> Batch:
        """Called by PyTorch's DataLoader in place of `take`."""
        return Slots.of(self).take(self, pin=True)
