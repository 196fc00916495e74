"""The tensors of a checkpoint, by name, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lavis_ds.engines.base import persistent_buffers, saved_parameters
from lavis_ds.models.weights import read_keys


@dataclass(frozen=True)
class Stored:
    """One tensor that is not in memory.

    Attributes:
        shape: its shape.
        dtype: its type.
        read: brings it into memory, on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def empty(self) -> Tensor:
        """A tensor of this shape and type without content, on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def cast(self, dtype: torch.dtype) -> Stored:
        """The same in another type."""
        return Stored(self.shape, dtype, lambda: self.read().to(dtype))


def stored_tensors(checkpoint: Path) -> dict[str, Stored]:
    """Parameter name -> tensor of the checkpoint's `weights/`, whatever the ZeRO stage it was trained with.

    Raises:
        CheckpointError: there are no weights, or a file is missing or damaged.
    """
    keys = read_keys(checkpoint)
    tensors: dict[str, Stored] = {}
    for path in dict.fromkeys(keys.values()):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found = file.get_slice(name)
                dtype = file.get_tensor(name).dtype if not found.get_shape() else found[:0].dtype
                tensors[name] = Stored(tuple(found.get_shape()), dtype, _reader(path, name))
    return tensors


def tensors_of(model: nn.Module) -> dict[str, Stored]:
    """The tensors of a model that is in memory, in the same form."""
    named = {**dict(saved_parameters(model)), **dict(persistent_buffers(model))}
    return {name: Stored(tuple(t.shape), t.dtype, t.detach) for name, t in named.items()}


def common_dtype(tensors: Iterable[Stored]) -> torch.dtype:
    """The floating-point type that most elements have."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.empty().numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _reader(path: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:  # opened anew each time: what was read is unmapped again
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return read
