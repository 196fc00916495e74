"""Baselines, counted by hand."""

from __future__ import annotations

import pytest

from lavis_ds.data.conversation import Conversation, Image, Role, Text, Turn
from lavis_ds.tasks.baselines import answer_priors, pairs

TRAINING = [
    ("color?", "red"),
    ("color?", "red"),
    ("color?", "blue"),
    ("there?", "yes"),
    ("there?", "no"),
    ("there?", "no"),
    ("there?", "no"),
]


def test_both_predictors() -> None:
    """Majority says `no`; with the question `red` for color?, `no` for there?, and `no` for the unseen one."""
    asked = [
        ("color?", "red", "color"),
        ("color?", "blue", "color"),
        ("color?", "red", "color"),
        ("there?", "no", "yes_no"),
        ("unseen?", "no", "yes_no"),
        ("unseen?", "yes", "yes_no"),
    ]
    assert answer_priors(TRAINING, asked) == {
        "baseline/majority/accuracy": pytest.approx(2 / 6),
        "baseline/majority/accuracy/color": 0.0,
        "baseline/majority/accuracy/yes_no": pytest.approx(2 / 3),
        "baseline/language_only/accuracy": pytest.approx(4 / 6),
        "baseline/language_only/accuracy/color": pytest.approx(2 / 3),
        "baseline/language_only/accuracy/yes_no": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize("training", [[("q", "b"), ("q", "a")], [("q", "a"), ("q", "b")]])
def test_equally_frequent_answers_are_taken_in_the_order_of_the_alphabet(training: list[tuple[str, str]]) -> None:
    assert answer_priors(training, [("q", "a", "all")])["baseline/language_only/accuracy"] == 1.0
    assert answer_priors(training, [("other", "a", "all")])["baseline/majority/accuracy"] == 1.0


def turn(role: Role, text: str) -> Turn:
    return Turn(role, (Image("/p.png"), Text(text)) if role == "user" else (Text(text),))


def test_pairs_are_every_question_with_its_answer() -> None:
    conversation = Conversation(
        "a",
        (
            turn("system", "Be kind."),
            turn("user", "one?"),
            turn("assistant", "1"),
            turn("user", "two?"),
            turn("assistant", "2"),
        ),
    )
    assert list(pairs([conversation, conversation])) == [("one?", "1"), ("two?", "2")] * 2
