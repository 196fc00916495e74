"""Write the tensors of a Hugging Face model, one file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from lavis_ds.errors import CheckpointError
from lavis_ds.host_memory import returning_freed_memory
from lavis_ds.runners.export.stored import Stored
from lavis_ds.runners.export.target import Piece, Target

SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Saved:
    """What one tensor of the model becomes on disk: several where transformers joins experts when it loads them.

    Attributes:
        name: in the model.
        files: name in the files -> shape and type.
    """

    name: str
    files: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.files.values())


class Writer:
    """Tensors of a checkpoint -> files of a Hugging Face model, in the names that `save_pretrained` gives them.

    Args:
        target: what is written.
        skeleton: the target's model on the meta device.
        tensors: the checkpoint's.
        dtype: of floating-point tensors.

    Attributes:
        saved: what will be written, in order.

    Raises:
        CheckpointError: transformers makes some tensors on disk of several in memory, which no model here needs.
    """

    def __init__(self, target: Target, skeleton: Any, tensors: Mapping[str, Stored], dtype: torch.dtype) -> None:
        self._target, self._skeleton, self._tensors, self._dtype = target, skeleton, tensors, dtype
        self.saved = [self._plan(name) for name in skeleton.state_dict() if name in target.pieces]
        whole = revert_weight_conversion(skeleton, {name: self._empty(name) for name in target.pieces})
        if {name for saved in self.saved for name in saved.files} != set(whole):
            raise CheckpointError(f"tensors of a {type(skeleton).__name__} can't be saved one by one.")

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(saved.num_bytes for saved in self.saved)

    def write(self, folder: Path, max_shard_bytes: int = SHARD_BYTES) -> int:
        """Write all files and, where there are several, their index. Returns the number of files."""
        shards = list(_split(self.saved, max_shard_bytes))
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            with returning_freed_memory():
                content = {name: tensor for saved in shard for name, tensor in self._made(saved.name)}
                save_file(content, folder / file, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(content, file)
                content.clear()  # before the next is made
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return len(shards)

    def _plan(self, name: str) -> Saved:
        files = revert_weight_conversion(self._skeleton, {name: self._empty(name)})
        return Saved(name, {key: (tuple(t.shape), self._dtype_of(t)) for key, t in files.items()})

    def _made(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors that `name` becomes on disk, each in memory of its own."""
        whole = self._make(name, lambda stored: stored.read())
        for key, tensor in revert_weight_conversion(self._skeleton, {name: whole}).items():
            yield key, torch.empty(tensor.shape, dtype=self._dtype_of(tensor)).copy_(tensor)

    def _empty(self, name: str) -> Tensor:
        return self._make(name, Stored.empty).to("meta")

    def _make(self, name: str, read: Callable[[Stored], Tensor]) -> Tensor:
        piece: Piece = self._target.pieces[name]
        return piece.make([read(self._tensors[source]) for source in piece.sources])

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def _split(saved: list[Saved], max_bytes: int) -> Iterator[list[Saved]]:
    shard: list[Saved] = []
    size = 0
    for entry in saved:
        if shard and size + entry.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.num_bytes
    yield shard
