"""The report: one self-contained HTML page for a run, or for several compared. No scripts, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lavis_ds.errors import ConfigError
from lavis_ds.runners.observers.scores import scores
from lavis_ds.runners.report import curves, evaluation, gallery, page, summary
from lavis_ds.runners.report.curves import Chart, Series
from lavis_ds.runners.report.read import Run, read_run

MAX_RUNS = 8
_GALLERY_SIZE = 24


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """The path of the page written.

    Args:
        folders: run folders; the first is the one that others are compared with.
        output: where to write; by default `report.html` in the run folder, for several `comparison.html` beside the
            first of them.

    Raises:
        ConfigError: a folder is no run folder, or none or more than MAX_RUNS are given.
    """
    if not 1 <= len(folders) <= MAX_RUNS:
        raise ConfigError("a report needs run folders.", given=len(folders), expected=f"1 to {MAX_RUNS}")
    runs = [read_run(Path(folder)) for folder in folders]
    _tell_apart(runs)
    return page.write(output or default_output(folders), render(runs))


def default_output(folders: Sequence[Path]) -> Path:
    """Where the page of these run folders goes if nobody says."""
    return folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"


def _tell_apart(runs: list[Run]) -> None:
    """Put the parent folder's name before names that occur twice."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"


def render(runs: list[Run]) -> str:
    """The page of these runs as HTML. Every text that comes from data is escaped."""
    galleries = [g for run in runs for g in gallery.galleries(run, max(1, _GALLERY_SIZE // len(runs)))]
    return page.render(
        Path(__file__).parent / "page.html",
        runs=runs,
        figures=summary.figures(runs[0]),
        figure_rows=summary.table_of(runs, summary.figure_row),
        setting_rows=summary.table_of(runs, summary.settings),
        environment_rows=summary.table_of(runs, summary.environment),
        charts=charts(runs),
        chart_box=(curves.WIDTH, curves.HEIGHT, curves.LEFT, curves.RIGHT, curves.TOP, curves.BOTTOM),
        splits=evaluation.splits(runs),
        galleries=galleries,
        notes=[(run.name, note) for run in runs for note in run.notes],
    )


def charts(runs: list[Run]) -> list[Chart]:
    """The curves that the runs have values for."""
    loss = [*_metric(runs, "train/loss", "training loss", "noisy"), *_evaluated(runs, "loss")]
    step_time = _metric(runs, "time/step_s", "whole step", "noisy")
    if len(runs) == 1:
        step_time += [replace(series, color=1) for series in _metric(runs, "time/data_s", "waiting for data", "noisy")]
    accuracy = _evaluated(runs, "accuracy") or _evaluated(runs, "token_accuracy")
    drawn = [
        curves.draw("Loss", loss, "per target token"),
        curves.draw(
            "Accuracy in evaluation",
            accuracy,
            from_zero=True,
            text=lambda share: f"{100 * share:.3g} %",
        ),
        curves.draw("Learning rate", _metric(runs, "train/lr", "learning rate", "line"), from_zero=True),
        curves.draw(
            "Gradient norm",
            _metric(runs, "train/grad_norm", "gradient norm", "noisy"),
            "before clipping",
            from_zero=True,
        ),
        curves.draw(
            "Throughput",
            _metric(runs, "throughput/tokens_per_s", "tokens/s", "noisy"),
            "tokens per second",
            from_zero=True,
        ),
        curves.draw("Time of a step", step_time, "seconds", from_zero=True),
    ]
    return [chart for chart in drawn if chart is not None]


def _metric(runs: list[Run], name: str, label: str, style: str) -> list[Series]:
    """One series a run, named by what it is for one run and by the run where there are several."""
    return [
        Series(run.name if len(runs) > 1 else label, color, *run.metrics[name], style=style)
        for color, run in enumerate(runs)
        if name in run.metrics
    ]


def _evaluated(runs: list[Run], score_name: str) -> list[Series]:
    """A score over its evaluations, one series a run and split, where there are at least two to connect."""
    series = []
    for index, run in enumerate(runs):
        for number, split in enumerate(dict.fromkeys(e.split for e in run.evaluations)):
            found = [
                (e.step, s.value)
                for e in run.evaluations
                if e.split == split
                for s in scores(e.metrics)
                if s.name == score_name
            ]
            if len(found) < 2:
                continue
            steps, values = np.array(found, dtype=float).T
            label = f"{split} {score_name}" if len(runs) == 1 else f"{run.name}, {split}"
            color = index if len(runs) > 1 else (number + 1) % MAX_RUNS
            series.append(Series(label, color, steps, values, style="points"))
    return series
