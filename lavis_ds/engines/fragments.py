"""What an optimizer knows of each parameter, in files that any layout can read.

Engines cut parameters into fragments: a rank holds a stretch of a flattened parameter's float32 master and of the
optimizer's moments. Every rank writes the fragments it owns, by the parameter's name and the stretch's place in it. So
a run may go on with other ranks, another ZeRO stage or another engine: each rank reads the stretches that it holds now,
whoever wrote them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lavis_ds.errors import CheckpointError

MASTER = "master"
_MAX_FILE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Fragment:
    """A stretch of one trainable parameter on this rank.

    Attributes:
        name: of the parameter.
        start: its first element, in the flattened parameter.
        shape: of the whole parameter.
        master: its float32 weights, 1-D; a view, so that writing to it changes them.
        moments: what else the optimizer has an element of for each weight (`exp_avg`, ...), views of the same length.
        clock: the mapping that holds the optimizer's count of steps as `step`.
        has_own_master: False where the model's own weights are the master, so that it is not written twice.
        is_owner: False where another rank writes the same.
    """

    name: str
    start: int
    shape: torch.Size
    master: Tensor
    moments: dict[str, Tensor]
    clock: dict[str, Any]
    has_own_master: bool = True
    is_owner: bool = True


def on_host(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Copies of those that this rank owns, which later steps do not change."""
    return [
        replace(
            fragment,
            master=_copied(fragment.master),
            moments={kind: _copied(moment) for kind, moment in fragment.moments.items()},
            clock={"step": float(fragment.clock.get("step", 0))},
        )
        for fragment in fragments
        if fragment.is_owner
    ]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def write(fragments: Iterable[Fragment], folder: Path, rank: int) -> None:
    """Write those that this rank owns; no more than one file is in host memory at a time."""
    pending: dict[str, Tensor] = {}
    places: dict[str, dict[str, Any]] = {}
    number = size = 0

    def flush() -> None:
        nonlocal number, size
        path = folder / f"rank_{rank:05d}_{number:05d}.safetensors"
        save_file(pending, path, metadata={"fragments": json.dumps(places)})
        pending.clear()
        places.clear()
        number, size = number + 1, 0

    for fragment in fragments:
        if not fragment.is_owner:
            continue
        pieces = {**fragment.moments, **({MASTER: fragment.master} if fragment.has_own_master else {})}
        added = sum(piece.nbytes for piece in pieces.values())
        if pending and size + added > _MAX_FILE_BYTES:
            flush()
        for kind, piece in pieces.items():
            pending[f"{kind}:{fragment.name}"] = _copied(piece)
        places[fragment.name] = {
            "start": fragment.start,
            "numel": fragment.master.numel(),
            "shape": list(fragment.shape),
            "step": float(fragment.clock.get("step", 0)),
        }
        size += added
    if places:
        flush()


class _Place(NamedTuple):
    path: Path
    start: int
    numel: int


class StoredFragments:
    """The fragments in a folder, by parameter.

    Raises:
        CheckpointError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.steps: dict[str, float] = {}
        self._files: dict[Path, tuple[Any, frozenset[str]]] = {}
        for path in sorted(folder.glob("rank_*.safetensors")):
            for name, place in json.loads(self._file(path)[0].metadata()["fragments"]).items():
                self._places[name].append(_Place(path, place["start"], place["numel"]))
                self.shapes[name], self.steps[name] = tuple(place["shape"]), place["step"]

    def fill(self, target: Tensor, kind: str, name: str, start: int) -> bool:
        """Copy the stretch of `name` from `start` on into `target` (1-D). Returns False where this kind was not saved.

        Raises:
            CheckpointError: a part of the stretch is in no file.
        """
        filled = 0
        for place in self._places[name]:
            first, last = max(start, place.start), min(start + target.numel(), place.start + place.numel)
            (file, keys), key = self._file(place.path), f"{kind}:{name}"
            if key not in keys:
                return False
            if first < last:
                piece = file.get_slice(key)[first - place.start : last - place.start]
                target[first - start : last - start].copy_(piece)
                filled += last - first
        if filled != target.numel():
            raise CheckpointError(
                f"{target.numel() - filled:,} elements of {kind} of {name} are in no file.", where=str(self._folder)
            )
        return True

    def _file(self, path: Path) -> tuple[Any, frozenset[str]]:
        """The open file and its keys: a parameter's stretches lie in several files, so all of them stay open."""
        if path not in self._files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"this file is damaged ({error}).", where=str(path)) from error
            self._files[path] = file, frozenset(file.keys())
        return self._files[path]


def restore(fragments: Iterable[Fragment], stored: StoredFragments, weights: Mapping[str, Tensor]) -> list[str]:
    """Fill what this rank holds from what any ranks wrote.

    Args:
        fragments: of this rank.
        stored: of the checkpoint.
        weights: the checkpoint's whole weights by name, which are the masters where no others were written.

    Returns:
        Names of parameters that the checkpoint's optimizer did not have; their moments start from zero.

    Raises:
        CheckpointError: a parameter had another shape, or a part of it is missing.
    """
    fresh = []
    for fragment in fragments:
        name, start, numel = fragment.name, fragment.start, fragment.master.numel()
        if name not in stored.shapes:
            fresh.append(name)
            fragment.master.copy_(weights[name].flatten()[start : start + numel])
            continue
        if stored.shapes[name] != tuple(fragment.shape):
            raise CheckpointError(
                f"{name} had another shape.", given=str(tuple(fragment.shape)), expected=str(stored.shapes[name])
            )
        if not stored.fill(fragment.master, MASTER, name, start):
            fragment.master.copy_(weights[name].flatten()[start : start + numel])
        for kind, moment in fragment.moments.items():
            if not stored.fill(moment, kind, name, start):
                raise CheckpointError(f"the optimizer had no {kind}.", where=name, hint="Was it another optimizer?")
        clock = fragment.clock.get("step", 0.0)
        step = stored.steps[name]
        fragment.clock["step"] = torch.full_like(clock, step) if isinstance(clock, Tensor) else type(clock)(step)
    return list(dict.fromkeys(fresh))


def moments_of(optimizer: torch.optim.Optimizer, held: Tensor) -> dict[str, Any]:
    """State of what the optimizer updates, made of zeros before its first step.

    Raises:
        CheckpointError: the optimizer keeps what can't be cut into stretches.
    """
    state: dict[str, Any] = optimizer.state[held]
    if not state:
        step = torch.zeros((), dtype=torch.float32, device=held.device if _counts_on_device(optimizer) else "cpu")
        is_torch = isinstance(optimizer, torch.optim.AdamW)
        state |= {"step": step if is_torch else 0}
        state |= {
            name: torch.zeros_like(held, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")
        }
    for name, value in state.items():
        if name != "step" and not (isinstance(value, Tensor) and value.numel() == held.numel()):
            raise CheckpointError(f"{type(optimizer).__name__} keeps {name}, which can't be saved in stretches.")
    return state


def _counts_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def whole(
    named: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    world_size: int,
    copies: Mapping[int, Tensor] | None = None,
) -> Iterator[Fragment]:
    """Fragments of an optimizer that updates whole parameters, the same on every rank: each owns every n-th.

    Args:
        named: parameters by name.
        optimizer: what updates them.
        rank: of this process.
        world_size: number of ranks.
        copies: id of a parameter -> the float32 copy that is updated in its place, where there are such.
    """
    held = copies if copies is not None else {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in named if id(p) in held]
    for number, (name, parameter) in enumerate(trained):
        master = held[id(parameter)]
        state = moments_of(optimizer, master)
        moments = {kind: value.view(-1) for kind, value in state.items() if kind != "step"}
        yield Fragment(
            name,
            0,
            parameter.shape,
            master.detach().view(-1),
            moments,
            state,
            has_own_master=copies is not None,
            is_owner=number % world_size == rank,
        )
