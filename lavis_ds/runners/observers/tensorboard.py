"""TensorBoard events in `tensorboard/` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from lavis_ds.runners.observers.base import Metrics, Observer, RunInfo


class TensorboardObserver(Observer):
    """Every number of every step and evaluation as a scalar, and the configuration as text."""

    _folder = ""
    _writer: SummaryWriter | None = None
    _has_stepped = False

    def on_start(self, run: RunInfo, state: object) -> None:
        self._folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(self._folder)
        self._writer.add_text(
            "config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```", run.start_step
        )

    def on_step(self, step: int, metrics: Metrics) -> None:
        if not self._has_stepped:
            self._hide_from(step)
        self._add(metrics, step)

    def on_evaluate(
        self, split: str, step: int, metrics: Mapping[str, float], predictions: Sequence[Mapping[str, Any]]
    ) -> None:
        self._add({f"eval/{split}/{name}": value for name, value in metrics.items()}, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _hide_from(self, step: int) -> None:
        """Have TensorBoard hide the events from `step` on of an earlier start, which are done again.

        Not before the first step: evaluating an old checkpoint must hide nothing.
        """
        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=step, filename_suffix=".steps")
        self._has_stepped = True

    def _add(self, metrics: Metrics, step: int) -> None:
        if self._writer is None:
            raise RuntimeError("a hook was called before on_start")
        for name, value in metrics.items():
            if not isinstance(value, list):
                self._writer.add_scalar(name, value, step)
