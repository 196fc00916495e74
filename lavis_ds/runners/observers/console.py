"""What a person sees while a run goes on: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from lavis_ds.runners.observers.base import Metrics, Observer, RunInfo
from lavis_ds.runners.observers.numbers import duration, short
from lavis_ds.runners.observers.scores import scores

_RECENT_STEPS = 200
_SHOWN = (
    ("train/loss", "loss {:.4f}"),
    ("train/lr", "lr {:.2e}"),
    ("train/grad_norm", "grad norm {:.2f}"),
    ("throughput/tokens_per_s", "{} tokens/s"),
)


class ConsoleObserver(Observer):
    """Start summary, progress, evaluation tables and checkpoint lines on standard output.

    Args:
        log_every: optimizer steps between plain lines where the output is not a terminal.
        console: where to write; standard output by default.
        clock: seconds that only grow.
    """

    def __init__(
        self, log_every: int = 10, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(log_every)
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._total_steps = self._step = 0
        self._started_s = clock()
        # Time left comes from recent steps, evaluations and checkpoints between them included.
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._progress: Progress | None = None
        self._bar = TaskID(0)

    def on_start(self, run: RunInfo, state: object) -> None:
        self._total_steps, self._step, self._started_s = run.total_steps, run.start_step, self._clock()
        self._recent.append((run.start_step, self._started_s))
        self._console.print(_two_columns(run.summary))
        if run.start_step:
            self._line(f"Resumed after step {run.start_step} of {run.total_steps}.")
        if self._console.is_terminal:
            self._start_bar()

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._recent.append((step, self._clock()))
        numbers = "  ".join(_texts(metrics))
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, numbers=numbers, left=self._time_left())
        elif step % self.log_every == 0 or step == self._total_steps:
            width = len(str(self._total_steps))
            share = 100 * step / self._total_steps
            self._line(f"step {step:>{width}}/{self._total_steps} {share:5.1f}%  {numbers}  left {self._time_left()}")

    def on_evaluate(
        self, split: str, step: int, metrics: Mapping[str, float], predictions: Sequence[Mapping[str, Any]]
    ) -> None:
        title = f"{split} after step {step}" + (f", {len(predictions)} predictions" if predictions else "")
        self._console.print(_score_table(title, metrics))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._line(f"Checkpoint of step {step}: {path}")

    def on_message(self, text: str) -> None:
        self._line(text)

    def on_end(self, status: str) -> None:
        self.close()
        took = duration(self._clock() - self._started_s)
        self._line(f"Run {status} after step {self._step} of {self._total_steps} in {took}.")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, text: str) -> None:
        # Text, not markup, because paths and messages may hold brackets; never wrapped, so that logs can be searched.
        self._console.print(Text(text), soft_wrap=True)

    def _start_bar(self) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:.0f}%  {task.fields[numbers]}  left {task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._bar = self._progress.add_task(
            "train", total=self._total_steps, completed=self._step, numbers="", left="?"
        )
        self._progress.start()

    def _time_left(self) -> str:
        (first_step, first_s), (last_step, last_s) = self._recent[0], self._recent[-1]
        return duration((last_s - first_s) / (last_step - first_step) * (self._total_steps - last_step))


def _texts(metrics: Metrics) -> list[str]:
    texts = []
    for name, form in _SHOWN:
        value = metrics.get(name)
        if value is not None and not isinstance(value, list):
            texts.append(form.format(value if ":" in form else short(value)))
    return texts


def _two_columns(lines: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines.items():
        table.add_row(Text(label), Text(value))
    return table


def _score_table(title: str, metrics: Mapping[str, float]) -> Table:
    rows = scores(metrics)
    labels = list(dict.fromkeys(label for row in rows for label in row.baselines))
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for column in ("value", *labels):
        table.add_column(Text(column), justify="right", no_wrap=True)
    for row in rows:
        beside = [row.text(row.baselines[label]) if label in row.baselines else "" for label in labels]
        table.add_row(Text(row.name), row.text(), *beside)
    return table
