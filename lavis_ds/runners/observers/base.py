"""`Observer`: what may watch a run. Observers only read, return nothing, and exist on global rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Metrics = Mapping[str, float | list[str]]
"""One step's numbers by name (`train/loss`, ...); lists of strings are sample ids."""


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run when it starts.

    Attributes:
        folder: the run folder, which exists.
        total_steps: optimizer steps of the whole schedule.
        config: the resolved configuration as a plain tree.
        summary: label -> text, printed when the run starts (parameters, global batch, engine, precision, ranks, ...).
        start_step: optimizer steps done before this start; 0 unless resumed.
    """

    folder: Path
    total_steps: int
    config: dict[str, Any]
    summary: Mapping[str, str] = field(default_factory=dict)
    start_step: int = 0


class Observer:
    """Base of the observers; every hook does nothing, so a subclass overrides the ones it needs.

    What changes the result of a run is a line of the loop, never an observer.

    Args:
        log_every: optimizer steps between lines, for observers that print.
    """

    def __init__(self, log_every: int = 1) -> None:
        self.log_every = log_every

    def on_start(self, run: RunInfo, state: object) -> None:
        """The run is built (and resumed, where `run.start_step` > 0); `state` is its TrainState, to read only."""

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Optimizer step `step` (the first is 1) is done; `metrics` are already reduced over the ranks."""

    def on_evaluate(
        self, split: str, step: int, metrics: Mapping[str, float], predictions: Sequence[Mapping[str, Any]]
    ) -> None:
        """`split` was evaluated after `step` steps, and its files in `eval/` are written.

        Args:
            split: the name of the split.
            step: optimizer steps done.
            metrics: scores by name; see `scores.py` for what names mean.
            predictions: one record a sample: id, images, question, answer, prediction, correct, question_type.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A complete checkpoint of `step` lies at `path`."""

    def on_message(self, text: str) -> None:
        """Something a person should read."""

    def on_end(self, status: str) -> None:
        """The run is over; `status` is one word or sentence, such as `finished` or `stopped on request`."""

    def close(self) -> None:
        """Release files and connections. Called once, also after an error, when `on_end` may not have been called."""
