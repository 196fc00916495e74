"""Which collectives this rank has called, as PyTorch's flight recorder has them, and where ranks part ways.

A rank that waits for another one does so in a collective. On GPUs the CPU is past it already, so that no stack shows
it: the recorder does, with the place in the code that called it.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce_scatter", "all_gather_base", "allgather_base")
"""Operations that take tensors of the same sizes on all ranks."""

_INSIDE = (
    "torch/distributed/", "torch/autograd/", "torch/utils/", "deepspeed/comm/", "deepspeed/utils/",
    "lavis_ds/distributed.py",
)  # fmt: skip
"""Code that only passes a call on."""


@dataclass(frozen=True)
class Collective:
    """One call.

    Attributes:
        group: name of the process group.
        number: of the call among those of the group.
        name: such as `all_reduce`.
        sizes: of the input's tensors, with their type.
        caller: the place in the code.
        is_done: the call has come back.
        since_ns: when it was called, on this machine's clock.
    """

    group: str
    number: int
    name: str
    sizes: str
    caller: str
    is_done: bool
    since_ns: int

    @property
    def kind(self) -> tuple[str, str]:
        """What must be the same on all ranks for the call of the same number."""
        return self.name, self.sizes if any(part in self.name for part in _SAME_SIZES) else ""

    def __str__(self) -> str:
        what = f"{self.name} of {self.sizes}" if self.sizes else self.name
        return f"{what}, called {self.caller}" if self.caller else what


@dataclass(frozen=True)
class Parting:
    """Where ranks part ways.

    Attributes:
        ranks: that are said to be the ones; all that differ where nobody can tell.
        text: what happened.
        is_lag: the ranks have not made a call that others have; else they have made another one.
    """

    ranks: tuple[int, ...]
    text: str
    is_lag: bool = False


def recorded() -> list[Collective]:
    """The latest of this rank, oldest first; none where PyTorch does not record them (`TORCH_FR_BUFFER_SIZE=0`)."""
    found = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # gloo's and NCCL's
        dump = getattr(_distributed_c10d, name, None)
        entries = pickle.loads(dump()).get("entries", []) if dump is not None else []
        found += [_collective(entry) for entry in entries if not entry["is_p2p"]]
    return sorted({(c.group, c.number): c for c in found}.values(), key=lambda c: c.since_ns)


def _collective(entry: Mapping[str, Any]) -> Collective:
    pairs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    return Collective(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        sizes=", ".join(f"{' x '.join(map(str, sizes)) or 'a'} {dtype}" for sizes, dtype in pairs),
        caller=_caller(entry.get("frames") or []),
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
        since_ns=entry["time_created_ns"],
    )


def _caller(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        path = str(frame["filename"])
        if not any(part in path for part in _INSIDE):
            root = max((root for root in sys.path if root and path.startswith(f"{root}/")), key=len, default="")
            return f"in {frame['name']} ({path.removeprefix(root).lstrip('/')}:{frame['line']})"
    return ""


def parting(ranks: Mapping[int, Sequence[Collective]]) -> Parting | None:
    """Where the ranks' calls differ: the first call that is not the same, else the first that some have not made.

    Args:
        ranks: rank -> its calls, oldest first.

    Returns:
        None where all have made the same calls, or nothing is known.
    """
    by_group: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, calls in ranks.items():
        for call in calls:
            by_group.setdefault(call.group, {}).setdefault(rank, {})[call.number] = call
    shared = [group for group in by_group.values() if len(group) > 1]
    found = [mismatch for group in shared if (mismatch := _mismatch(group))]
    found = found or [lag for group in shared if (lag := _lag(group))]
    return min(found, key=lambda pair: pair[0])[1] if found else None


Calls = Mapping[int, Mapping[int, Collective]]
"""Rank -> number -> call, of one process group."""


def _mismatch(group: Calls) -> tuple[int, Parting] | None:
    """The first call that is not the same on all ranks, and when it was made."""
    common = sorted(set.intersection(*(set(calls) for calls in group.values())))
    number = next((n for n in common if len({calls[n].kind for calls in group.values()}) > 1), None)
    if number is None:
        return None
    at = {rank: calls[number] for rank, calls in group.items()}
    ranks = _odd_ones(group, number)
    told = "; ".join(f"rank {rank} is in {call}" for rank, call in list(at.items())[:4])
    text = f"not all ranks make the same calls: as call {number:,}, {told}"
    return min(call.since_ns for call in at.values()), Parting(ranks, text)


def _odd_ones(group: Calls, number: int) -> tuple[int, ...]:
    """The minority; among equals those whose call has never followed the one before it until now; else all."""
    kinds = {rank: calls[number].kind for rank, calls in group.items()}
    (_, most), *others = Counter(kinds.values()).most_common()
    if most > others[0][1]:
        usual = Counter(kinds.values()).most_common(1)[0][0]
        return tuple(sorted(rank for rank, kind in kinds.items() if kind != usual))
    new = tuple(sorted(rank for rank, calls in group.items() if not _has_been_before(calls, number)))
    return new if 0 < len(new) < len(group) else tuple(sorted(group))


def _has_been_before(calls: Mapping[int, Collective], number: int) -> bool:
    def pair(n: int) -> tuple[Any, ...] | None:
        return None if n - 1 not in calls else (calls[n - 1].kind, calls[n - 1].caller, calls[n].kind, calls[n].caller)

    return any(pair(n) == pair(number) for n in calls if n < number)


def _lag(group: Calls) -> tuple[int, Parting] | None:
    """The first call that some ranks have made and others not, and when it was made."""
    newest = {rank: max(calls) for rank, calls in group.items()}
    fewest = min(newest.values())
    waited = [calls[fewest + 1] for calls in group.values() if fewest + 1 in calls]
    if not waited:
        return None
    ranks = tuple(sorted(rank for rank, number in newest.items() if number == fewest))
    call = min(waited, key=lambda c: c.since_ns)
    return call.since_ns, Parting(ranks, f"the other ranks wait for it in call {fewest + 1:,}, {call}", is_lag=True)


def waiting(calls: Sequence[Collective]) -> Collective | None:
    """The oldest call that has not come back."""
    return next((call for call in calls if not call.is_done), None)
