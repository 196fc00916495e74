"""Samples that can't be used: written down once each, and the end of the run when they are too many."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from lavis_ds import distributed
from lavis_ds.batch import Unusable
from lavis_ds.errors import DataError, listed
from lavis_ds.runners.job import writing
from lavis_ds.runners.observers.jsonl import cut

FILE_NAME = "quarantine.jsonl"
_SHOWN, _FEWEST = 10, 1000


class Quarantine:
    """The run's `quarantine.jsonl`, and the same record in memory on every rank.

    Args:
        folder: the run folder.
        last_step: step that the run goes on from; what was written after it will be found again.
        num_samples: samples of the training data; 0 where that is not known.
        max_fraction: share of them that may be unusable.
    """

    def __init__(self, folder: Path, last_step: int, num_samples: int, max_fraction: float) -> None:
        self._path, self._last_step = folder / FILE_NAME, last_step
        self._num_samples, self._max_fraction = num_samples, max_fraction
        self._found = self._read() if last_step else {}
        self._is_cut = False

    def add(self, step: int, unusable: Iterable[Unusable], *, samples_seen: int) -> None:
        """Write down this step's unusable samples of all ranks; called on all ranks with each one's own.

        Where the number of samples is not known, their share is that of `samples_seen`, of at least 1,000.

        Raises:
            DataError: there are now more than allowed; the first ones are listed.
        """
        new: dict[str, Unusable] = {}
        for own in distributed.gather_objects(tuple(unusable)):
            new.update((sample.id, sample) for sample in own if sample.id not in self._found)
        self._found.update(new)
        if distributed.is_main() and new:
            with writing(self._path.parent):
                self._write(step, new.values())
        num_samples = self._num_samples or max(samples_seen, _FEWEST)
        check(self._found.values(), num_samples, self._max_fraction, str(self._path))

    def _write(self, step: int, unusable: Iterable[Unusable]) -> None:
        if not self._is_cut:
            if self._path.exists():
                cut(self._path, self._last_step)
            self._is_cut = True
        with self._path.open("a", encoding="utf-8") as file:
            for sample in unusable:
                file.write(json.dumps({"step": step, **asdict(sample)}, ensure_ascii=False) + "\n")

    def _read(self) -> dict[str, Unusable]:
        if not self._path.exists():
            return {}
        records = [
            json.loads(line)
            for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return {r["id"]: Unusable(r["id"], r["source"], r["reason"]) for r in records if r["step"] <= self._last_step}


def check(unusable: Iterable[Unusable], num_samples: int, max_fraction: float, where: str) -> None:
    """Raises:
    DataError: more than `max_fraction` of the samples are unusable; the first ones are listed.
    """
    found = list(unusable)
    if len(found) <= max_fraction * num_samples:
        return
    reasons = listed([sample.reason for sample in found[:_SHOWN]], len(found))
    raise DataError(
        f"{len(found)} of {num_samples:,} samples can't be used, which is more than data.max_bad_fraction"
        f" ({max_fraction:g}) allows:{reasons}\n",
        where=where,
        hint="Mend or remove them, or raise data.max_bad_fraction to leave them out.",
    )
