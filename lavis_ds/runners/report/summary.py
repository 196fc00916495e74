"""The head of the page: a run's result in a few figures, the settings that matter, and what it ran on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lavis_ds.runners.observers.numbers import duration, percent, short, size_bytes
from lavis_ds.runners.observers.scores import scores
from lavis_ds.runners.report.curves import smooth, span_of
from lavis_ds.runners.report.read import Evaluation, Run

_SETTINGS = (
    ("Model", "model.arch"),
    ("Model type", "model.model_type"),
    ("Vision encoder", "model.vision.name"),
    ("Projector", "model.projector.name"),
    ("Language model", "model.language.name"),
    ("Frozen", "model.freeze"),
    ("Start weights", "model.pretrained"),
    ("Data", "datasets"),
    ("Task", "run.task.name"),
    ("Engine", "run.engine"),
    ("ZeRO stage", "run.deepspeed_config.zero_optimization.stage"),
    ("Precision", "run.precision"),
    ("Global batch", "run.global_batch_size"),
    ("Micro-batch", "run.batch_size_train"),
    ("Accumulation", "run.accum_grad_iters"),
    ("Epochs", "run.max_epoch"),
    ("Steps", "run.max_steps"),
    ("Learning rate", "run.init_lr"),
    ("Schedule", "run.lr_sched"),
    ("Warm-up steps", "run.warmup_steps"),
    ("Warm-up ratio", "run.warmup_ratio"),
    ("Weight decay", "run.weight_decay"),
    ("Gradient clip", "run.grad_clip"),
    ("Seed", "run.seed"),
)


@dataclass(frozen=True)
class Figure:
    """One headline number: `value` large, `detail` small below it."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Row:
    """One line of a table with a column a run."""

    label: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def figures(run: Run) -> list[Figure]:
    """The headline numbers that the files of the run give."""
    return [figure for make in _FIGURES if (figure := make(run)) is not None]


def table_of(runs: list[Run], rows_of: Callable[[Run], dict[str, str]]) -> list[Row]:
    """One row a label, one column a run; a label that a run lacks is a dash there."""
    columns = [rows_of(run) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return [Row(label, [column.get(label, "-") for column in columns]) for label in labels]


def settings(run: Run) -> dict[str, str]:
    """The settings that matter, label -> text; those that are not set are left out."""
    found = {label: _text(_lookup(run.config, key)) for label, key in _SETTINGS}
    return {label: text for label, text in found.items() if text}


def environment(run: Run) -> dict[str, str]:
    """`environment.json` as dotted keys; what is null is left out."""
    return {key: _text(value) for key, value in _leaves(run.environment) if value is not None}


def figure_row(run: Run) -> dict[str, str]:
    """The headline numbers as a table column."""
    return {figure.label: figure.value for figure in figures(run)}


def headline(run: Run) -> Evaluation | None:
    """The evaluation that stands for the run: the newest one, a test split before others of the same step."""
    return max(run.evaluations, key=lambda e: (e.step, "test" in e.split), default=None)


def _score(run: Run) -> Figure | None:
    evaluation = headline(run)
    fractions = [score for score in scores(evaluation.metrics) if score.is_fraction] if evaluation else []
    if evaluation is None or not fractions:
        return None
    score = fractions[0]
    beside = [f"{label} {score.text(value)}" for label, value in score.baselines.items()]
    label = f"{score.name.replace('_', ' ').capitalize()}, {evaluation.split}"
    return Figure(label, score.text(), " · ".join([f"after step {evaluation.step:,}", *beside]))


def _loss(run: Run) -> Figure | None:
    values = run.values("train/loss")
    if not len(values):
        return None
    span = span_of(len(values))
    detail = f"average of the last {span} steps" if span > 1 else "last step"
    return Figure("Training loss", f"{smooth(values, span)[-1]:.4g}", f"{detail} · first step {values[0]:.4g}")


def _steps(run: Run) -> Figure | None:
    if not run.last_step:
        return None
    of = _lookup(run.config, "run.max_steps")
    epochs = _lookup(run.config, "run.max_epoch")
    detail = f"of {of:,}" if isinstance(of, int) else f"of {epochs} epochs asked for" if epochs else ""
    return Figure("Optimizer steps", f"{run.last_step:,}", detail)


def _throughput(run: Run) -> Figure | None:
    values = run.values("throughput/tokens_per_s")
    if not len(values):
        return None
    mfu = run.values("throughput/mfu")
    return Figure(
        "Tokens per second",
        short(float(np.median(values))),
        f"median · MFU {percent(float(np.median(mfu)))}" if len(mfu) else "median",
    )


def _time(run: Run) -> Figure | None:
    seconds = run.values("time/step_s")
    return Figure("Training time", duration(float(seconds.sum())), "sum of the steps") if len(seconds) else None


def _memory(run: Run) -> Figure | None:
    peak = run.values("memory/peak_bytes")
    return Figure("Peak memory", size_bytes(float(peak.max())), "of rank 0") if len(peak) else None


_FIGURES: tuple[Callable[[Run], Figure | None], ...] = (_score, _loss, _steps, _throughput, _time, _memory)


def _lookup(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    """A setting as text; a mapping by its keys; the empty string for what is not set."""
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, dict | list):
        return ", ".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
