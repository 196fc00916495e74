"""Keeps `report.html` of the run folder up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lavis_ds.runners.observers.base import Observer, RunInfo
from lavis_ds.runners.report import write_report


class ReportObserver(Observer):
    """Writes the report after every evaluation and at the end. List it after `jsonl`, whose lines it reads."""

    _folder: Path | None = None

    def on_start(self, run: RunInfo, state: object) -> None:
        self._folder = run.folder

    def on_evaluate(
        self, split: str, step: int, metrics: Mapping[str, float], predictions: Sequence[Mapping[str, Any]]
    ) -> None:
        self._write()

    def on_end(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        if self._folder is None:
            raise RuntimeError("a hook was called before on_start")
        write_report([self._folder])
