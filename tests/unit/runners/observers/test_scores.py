"""Metric names to table rows, and numbers to text."""

from __future__ import annotations

import pytest

from lavis_ds.runners.observers.numbers import duration, percent, short, size_bytes
from lavis_ds.runners.observers.scores import scores


def test_baselines_stand_beside_their_score() -> None:
    rows = scores(
        {
            "accuracy": 0.8,
            "baseline/accuracy": 0.4,
            "accuracy/what": 0.7,
            "baseline/majority/accuracy/what": 0.1,
            "baseline/odd": 2.0,
        }
    )
    assert [(r.name, r.value, r.baselines) for r in rows] == [
        ("accuracy", 0.8, {"baseline": 0.4}),
        ("accuracy/what", 0.7, {"majority": 0.1}),
        ("baseline/odd", 2.0, {}),
    ]


def test_only_shares_are_percentages() -> None:
    rows = {
        r.name: r.text() for r in scores({"accuracy": 0.8, "loss": 0.8, "token_accuracy": 0.5, "accuracy_points": 80.0})
    }
    assert rows == {"accuracy": "80.0 %", "loss": "0.8", "token_accuracy": "50.0 %", "accuracy_points": "80"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.52314, "0.5231"),
        (2e-5, "2e-05"),
        (120.0, "120"),
        (12345.6, "12.35k"),
        (3.2e6, "3.2M"),
        (float("inf"), "inf"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


def test_other_numbers() -> None:
    assert [duration(s) for s in (0, 59.6, 3723, 93784)] == ["0:00", "1:00", "1:02:03", "1d 02:03:04"]
    assert percent(0.8619) == "86.2 %"
    assert [size_bytes(b) for b in (512, 2048, 7.3e9)] == ["512 B", "2 KiB", "6.8 GiB"]
