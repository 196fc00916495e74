"""Evaluation scores, split by split: the newest as bars with baselines, the earlier ones as a table."""

from __future__ import annotations

from dataclasses import dataclass

from lavis_ds.runners.observers.scores import Score, scores
from lavis_ds.runners.report.read import Evaluation, Run


@dataclass(frozen=True)
class Bar:
    """One run's value of a score; `percent` is the bar's length, None where the score is no share of 1."""

    color: int
    run_name: str
    text: str
    percent: float | None
    baselines: list[tuple[str, str, float]]


@dataclass(frozen=True)
class BarGroup:
    """A score with one bar a run."""

    name: str
    is_part: bool
    bars: list[Bar]


@dataclass(frozen=True)
class History:
    """All evaluations of a run on a split: one line a step."""

    run_name: str
    names: list[str]
    lines: list[tuple[int, list[str]]]


@dataclass(frozen=True)
class Split:
    """What the page shows of one split."""

    name: str
    steps: str
    groups: list[BarGroup]
    histories: list[History]
    has_baselines: bool


def splits(runs: list[Run]) -> list[Split]:
    """The splits that were evaluated, in the order first met."""
    names = dict.fromkeys(e.split for run in runs for e in run.evaluations)
    return [_split(name, runs) for name in names]


def _split(name: str, runs: list[Run]) -> Split:
    newest = [(color, run, e) for color, run in enumerate(runs) for e in run.last_evaluations() if e.split == name]
    rows = [(color, run, score) for color, run, e in newest for score in scores(e.metrics)]
    score_names = dict.fromkeys(score.name for _, _, score in rows)
    steps = sorted({e.step for _, _, e in newest})
    groups = [
        BarGroup(
            s.removeprefix("accuracy/"), "/" in s, [_bar(c, run, score) for c, run, score in rows if score.name == s]
        )
        for s in score_names
    ]
    histories = [_history(run.name, [e for e in run.evaluations if e.split == name]) for run in runs]
    return Split(
        name=name,
        steps=", ".join(f"{step:,}" for step in steps),
        groups=groups,
        histories=[h for h in histories if len(h.lines) > 1],
        has_baselines=any(score.baselines for _, _, score in rows),
    )


def _bar(color: int, run: Run, score: Score) -> Bar:
    baselines = [(label, score.text(value), 100 * value) for label, value in score.baselines.items()]
    return Bar(color, run.name, score.text(), 100 * score.value if score.is_fraction else None, baselines)


def _history(run_name: str, evaluations: list[Evaluation]) -> History:
    texts = [(e.step, {s.name: s.text() for s in scores(e.metrics)}) for e in evaluations]
    names = list(dict.fromkeys(name for _, row in texts for name in row))
    return History(run_name, names, [(step, [row.get(name, "-") for name in names]) for step, row in texts])
