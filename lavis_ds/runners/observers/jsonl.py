"""`metrics.jsonl`: one line an optimizer step, equal to an uninterrupted run's after any number of resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from lavis_ds.errors import DataError
from lavis_ds.runners.observers.base import Metrics, Observer, RunInfo

FILE_NAME = "metrics.jsonl"


class JsonlObserver(Observer):
    """Appends `{"step": ..., <metrics in the order given>}` to `metrics.jsonl` in the run folder.

    Floats are written by `repr`, so reading them gives the same bits. Every line is flushed. An infinite gradient norm
    (an fp16 step that was skipped) is written as `Infinity`, which Python and jq read.
    """

    _path: Path | None = None
    _file: TextIO | None = None

    def on_start(self, run: RunInfo, state: object) -> None:
        self._path = run.folder / FILE_NAME

    def on_step(self, step: int, metrics: Metrics) -> None:
        if self._file is None:
            self._file = self._open(step - 1)
        self._file.write(json.dumps({"step": step, **metrics}, ensure_ascii=False) + "\n")
        self._file.flush()

    def _open(self, last_step: int) -> TextIO:
        """The file, cut to `last_step`. Not before the first step: evaluating an old checkpoint must cut nothing."""
        if self._path is None:
            raise RuntimeError("on_step came before on_start")
        if self._path.exists():
            cut(self._path, last_step)
        return self._path.open("a", encoding="utf-8")

    def on_checkpoint(self, step: int, path: Path) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())  # a run resumed from here after a power cut still has every line

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut(path: Path, last_step: int) -> None:
    """Keep the lines of steps up to `last_step`, byte for byte; the file is replaced in one move.

    A last line that was half written when the run died is dropped.

    Raises:
        DataError: a line before the last one is not a step's line.
    """
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n") and not _is_json(line):
                break
            if _step_of(line, f"{path}:{number}") <= last_step:
                new.write(line.rstrip(b"\n") + b"\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _step_of(line: bytes, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "this line is no step's record.",
            where=where,
            given=repr(line[:80]),
            expected='{"step": N, ...}',
            hint="Mend the line or move the file away, then resume.",
        ) from error
