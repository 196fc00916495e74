"""Ends a run that stands still, and says which rank it waits for, in which operation and step, with which samples.

Ranks meet in collectives, so one that stalls stops all of them at nearly the same moment, and every rank's own watchdog
notices. Each writes what it knows into the run folder; the lowest rank that answers compares, and tells.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lavis_ds import distributed
from lavis_ds.errors import LavisError
from lavis_ds.runners import collectives
from lavis_ds.runners.collectives import Collective
from lavis_ds.runners.progress import Place, Progress

_POLL_S = 1.0
_ANSWERS_S = 10.0
"""How long the others may take to answer: ranks notice within a poll and a step's differences of each other."""

_ELSEWHERE = ("stacks", "calls")
"""What an answer's first line does not hold: the rest of the file, and a file of its own."""

_LAST_WORDS_S = 3.0
"""How long the others stay for the one that tells, since launchers end every rank soon after the first."""


@dataclass(frozen=True)
class Answer:
    """What one rank says about itself."""

    rank: int
    host: str
    step: int
    doing: str
    moves: int
    in_collective: bool
    samples: tuple[str, ...]
    stacks: str = ""
    calls: tuple[Collective, ...] = ()


class Watchdog:
    """Context of the training loop with a thread that ends the process where the loop doesn't move.

    Args:
        folder: where the stacks go, in a folder of this attempt's own; all ranks see it.
        timeout_s: longest time at one place.
        progress: kept by the loop.
    """

    def __init__(self, folder: Path, timeout_s: float, progress: Progress) -> None:
        self._folder = distributed.broadcast_object(folder / time.strftime("%Y%m%d_%H%M%S"))  # of this attempt alone
        self._timeout_s, self._progress = timeout_s, progress
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(_POLL_S, self._timeout_s / 4)):
            place = self._progress.place
            if place.may_stall and time.monotonic() - place.since_s > self._timeout_s:
                return self._end(place)

    def _end(self, place: Place) -> None:
        """Tell and end the process from here, since the main thread can't be reached where it is."""
        try:
            rank, world_size = distributed.global_rank(), distributed.world_size()
            self._write(rank, place)
            answers = self._answers(world_size)
            if rank == answers[0].rank:
                print(f"\nerror: {verdict(answers, world_size, self._timeout_s, self._folder)}\n", file=sys.stderr)
            else:
                time.sleep(_LAST_WORDS_S)
        except OSError as error:
            print(f"\nerror: step {place.step}: nothing moved ({place.doing}); {error}\n", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(2, all_threads=True)
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _write(self, rank: int, place: Place) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        own = self._folder / f"rank_{rank:05d}.txt"
        faulthandler.dump_traceback_later(_ANSWERS_S, exit=True, file=2)  # the recorder asks a GPU that may be dead
        calls = collectives.recorded()
        faulthandler.cancel_dump_traceback_later()
        text = "[" + ",\n".join(json.dumps(asdict(call)) for call in calls) + "]\n"
        (self._folder / f"collectives_{rank:05d}.json").write_text(text)
        at = (place.step, place.doing, place.moves, _is_in_collective(), place.samples)
        answer = Answer(rank, socket.gethostname(), *at)
        with own.with_suffix(".part").open("w") as file:
            file.write(json.dumps({k: v for k, v in asdict(answer).items() if k not in _ELSEWHERE}) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        own.with_suffix(".part").rename(own)

    def _answers(self, world_size: int) -> list[Answer]:
        """By rank; as many as came in time."""
        deadline = time.monotonic() + min(_ANSWERS_S, max(self._timeout_s, 2 * _POLL_S))
        while len(paths := sorted(self._folder.glob("rank_*.txt"))) < world_size and time.monotonic() < deadline:
            time.sleep(0.1)
        answers = []
        for path in paths:
            header, _, stacks = path.read_text(errors="replace").partition("\n")
            calls = json.loads(path.with_name(f"collectives_{path.stem[5:]}.json").read_text())
            answers.append(Answer(**json.loads(header), stacks=stacks, calls=tuple(Collective(**c) for c in calls)))
        return answers


def verdict(answers: Sequence[Answer], world_size: int, timeout_s: float, folder: Path) -> LavisError:
    """Which rank the others wait for.

    Args:
        answers: of the ranks that gave one, at least one.
        world_size: ranks of the run.
        timeout_s: how long nothing moved.
        folder: where the stacks of all ranks are.
    """
    silent = sorted(set(range(world_size)) - {answer.rank for answer in answers})
    parting = collectives.parting({answer.rank: answer.calls for answer in answers})
    behind = [a for a in answers if a.rank in parting.ranks] if parting else _least_moved(answers)
    first = behind[0]
    place = f" in {call}" if (call := collectives.waiting(answers[0].calls)) else ""
    waits = f"; the other ranks wait for it{place}"
    if silent:
        who, why = f"rank {_some(silent)}", "frozen, or its machine is gone: it did not even answer"
    elif len(behind) == len(answers):
        who, why = (f"all {world_size} ranks" if world_size > 1 else "rank 0"), first.doing
        waits = place and f"; it stands{place}"
    else:
        who, why = f"rank {_some([answer.rank for answer in behind])} on {first.host}", first.doing
    if parting and not silent:
        own = collectives.waiting(first.calls) if len(parting.ranks) == 1 and parting.is_lag else None
        waits = f"; {parting.text}" + (f"; it stands in {own}" if own else "")
    return LavisError(
        f"nothing moved for {timeout_s:g} s ({why}){waits}.",
        where=f"step {first.step}, {who}",
        given=None if silent or not first.samples else f"samples {', '.join(first.samples)}",
        hint=f"The stacks of all ranks are in {folder}. Where steps just take that long, raise run.stall_timeout_s."
        + ("" if silent else f" The stack of rank {first.rank}:\n{first.stacks.rstrip()}"),
    )


def _least_moved(answers: Sequence[Answer]) -> list[Answer]:
    # Under ZeRO, ranks also meet inside a forward and backward pass; then it is the one that is not at the meeting.
    least = min((answer.moves, answer.in_collective) for answer in answers)
    return [answer for answer in answers if (answer.moves, answer.in_collective) == least]


def _is_in_collective() -> bool:
    """Whether the main thread waits for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
