"""Evaluation metrics as rows of a table: each score with the baselines it is measured against.

What names mean:
    `accuracy`, `accuracy/<question type>`: a score, overall and of one kind of question.
    `baseline/<score>`: what a trivial answer reaches on that score.
    `baseline/<label>/<score>`: the same where there are several, such as `baseline/majority/accuracy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lavis_ds.runners.observers.numbers import percent, short

_PREFIX = "baseline/"
_FRACTIONS = ("accuracy", "exact_match", "f1", "precision", "recall")


@dataclass
class Score:
    """One score; `baselines` maps a label to the value a trivial answer reaches."""

    name: str
    value: float
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def is_fraction(self) -> bool:
        """Whether the value is a share of 1, to be shown in percent and as a bar."""
        is_share_by_name = any(word in self.name for word in _FRACTIONS)
        return is_share_by_name and all(0 <= v <= 1 for v in (self.value, *self.baselines.values()))

    def text(self, value: float | None = None) -> str:
        """The value (or another one, such as a baseline's) as text."""
        shown = self.value if value is None else value
        return percent(shown) if self.is_fraction else short(shown)


def scores(metrics: Mapping[str, float]) -> list[Score]:
    """The rows of `metrics`, in their order; a baseline that belongs to no score is a row of its own."""
    rows = {name: Score(name, value) for name, value in metrics.items() if not name.startswith(_PREFIX)}
    for name, value in metrics.items():
        if not name.startswith(_PREFIX):
            continue
        rest = name.removeprefix(_PREFIX)
        label, _, of = rest.partition("/")
        if rest in rows:
            rows[rest].baselines["baseline"] = value
        elif of in rows:
            rows[of].baselines[label] = value
        else:
            rows[name] = Score(name, value)
    return list(rows.values())
