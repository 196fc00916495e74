"""What an optimizer knows of each parameter, in files that any layout can read.

Engines cut parameters into fragments: a rank holds a stretch of a flattened parameter's float32 master and of the
optimizer's moments. Every rank writes the fragments it owns, by the parameter's name and the stretch's place in it. So
a run may go on with other ranks, another ZeRO stage or another engine: each rank reads the stretches that it holds now,
whoever wrote them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lavis_ds.errors import CheckpointError
from lavis_ds.optim import states

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
        scales: of 8-bit moments: one element for each block of neighbours, views of those that overlap this stretch.
        phase: elements of the first of these blocks that lie before this stretch.
    """

    name: str
    start: int
    shape: torch.Size
    master: Tensor
    moments: dict[str, Tensor]
    clock: dict[str, Any]
    has_own_master: bool = True
    is_owner: bool = True
    scales: dict[str, Tensor] = field(default_factory=dict)
    phase: int = 0


def on_host(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Copies of those that this rank owns, which later steps do not change."""
    return [
        replace(
            fragment,
            master=_copied(fragment.master),
            moments={kind: _copied(moment) for kind, moment in fragment.moments.items()},
            scales={kind: _copied(scale) for kind, scale in fragment.scales.items()},
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
        pieces = {**fragment.moments, **fragment.scales}
        pieces |= {MASTER: fragment.master} if fragment.has_own_master else {}
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
            **({"phase": fragment.phase} if fragment.scales else {}),
        }
        size += added
    if places:
        flush()


class _Place(NamedTuple):
    path: Path
    start: int
    numel: int
    phase: int | None  # None where the moments have no blocks


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
                self._places[name].append(_Place(path, place["start"], place["numel"], place.get("phase")))
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

    def fill_blocks(self, fragment: Fragment) -> None:
        """Copy 8-bit moments and their scales, which only go together as they were cut.

        Raises:
            CheckpointError: they were cut in other places, or were not in 8 bits.
        """
        for place in self._places[fragment.name]:
            if (place.start, place.numel, place.phase) == (fragment.start, fragment.master.numel(), fragment.phase):
                file = self._file(place.path)[0]
                for kind, target in {**fragment.moments, **fragment.scales}.items():
                    target.copy_(file.get_tensor(f"{kind}:{fragment.name}"))
                return
        raise self._not_in_blocks(fragment.name)

    def refuse_blocks(self, name: str) -> None:
        """Raises:
        CheckpointError: the moments are in 8 bits, and can't go where they would be in others.
        """
        if any(place.phase is not None for place in self._places[name]):
            raise self._not_in_blocks(name)

    def _not_in_blocks(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"8-bit moments of {name} were cut in other places, or are in other bits.",
            where=str(self._folder),
            hint="They go on only with optimizer, engine, ZeRO stage, ranks and trained parameters of before.",
        )

    def _file(self, path: Path) -> tuple[Any, frozenset[str]]:
        """The open file and its keys: a parameter's stretches lie in several files, so all of them stay open."""
        if path not in self._files:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"this file is damaged ({error}).", where=str(path)) from error
            self._files[path] = file, frozenset(file.keys())
        return self._files[path]


def restore(
    fragments: Iterable[Fragment], stored: StoredFragments, weights: Mapping[str, Tensor], kept: Container[str] = ()
) -> list[str]:
    """Fill what this rank holds from what any ranks wrote.

    Args:
        fragments: of this rank.
        stored: of the checkpoint.
        weights: the checkpoint's whole weights by name, which are the masters where no others were written.
        kept: names that `weights` leaves out; their masters stay as they are.

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
            if name not in kept:
                fragment.master.copy_(weights[name].flatten()[start : start + numel])
            continue
        if stored.shapes[name] != tuple(fragment.shape):
            raise CheckpointError(
                f"{name} had another shape.", given=str(tuple(fragment.shape)), expected=str(stored.shapes[name])
            )
        if not stored.fill(fragment.master, MASTER, name, start):
            fragment.master.copy_(weights[name].flatten()[start : start + numel])
        if fragment.scales:
            stored.fill_blocks(fragment)
        else:
            stored.refuse_blocks(name)
        for kind, moment in fragment.moments.items() if not fragment.scales else ():
            if not stored.fill(moment, kind, name, start):
                raise CheckpointError(f"the optimizer had no {kind}.", where=name, hint="Was it another optimizer?")
        clock = fragment.clock.get("step", 0.0)
        step = stored.steps[name]
        fragment.clock["step"] = torch.full_like(clock, step) if isinstance(clock, Tensor) else type(clock)(step)
    return list(dict.fromkeys(fresh))


def held_stretch(
    name: str, start: int, shape: torch.Size, held: Tensor, offset: int, numel: int, optimizer: torch.optim.Optimizer
) -> Fragment:
    """The fragment that lies at `offset` in what the optimizer updates.

    Raises:
        CheckpointError: the optimizer keeps what can't be cut into stretches.
    """
    state = states.state_of(optimizer, held)
    moments = states.moments(state)
    for kind, value in moments.items():
        if not (isinstance(value, Tensor) and value.numel() == held.numel()):
            raise CheckpointError(f"{type(optimizer).__name__} keeps {kind}, which can't be saved in stretches.")
    first, last = offset // states.BLOCK, (offset + numel - 1) // states.BLOCK
    return Fragment(
        name,
        start,
        shape,
        held.detach().view(-1).narrow(0, offset, numel),
        {kind: value.view(-1).narrow(0, offset, numel) for kind, value in moments.items()},
        state,
        scales={kind: value[first : last + 1] for kind, value in states.scales(state).items()},
        phase=offset % states.BLOCK,
    )


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
        found = held_stretch(name, 0, parameter.shape, master, 0, master.numel(), optimizer)
        yield replace(found, has_own_master=copies is not None, is_owner=number % world_size == rank)
