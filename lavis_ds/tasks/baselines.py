"""What a score is worth: how far one gets on a question-answering split without looking at a picture."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lavis_ds.data.conversation import Conversation

Pair = tuple[str, str]
"""Question and answer."""


def pairs(conversations: Iterable[Conversation]) -> Iterator[Pair]:
    """Every question with its answer."""
    for conversation in conversations:
        question = ""
        for turn in conversation.turns:
            if turn.role == "user":
                question = turn.text
            elif turn.role == "assistant":
                yield question, turn.text


def answer_priors(training: Iterable[Pair], evaluation: Sequence[tuple[str, str, str]]) -> Mapping[str, float]:
    """Scores of two predictors that know the training answers and never see a picture.

    `majority` always gives the most frequent training answer. `language_only` gives the most frequent training answer
    to the very same question text (to an unseen question, the majority's): without the picture no model can be expected
    to do better.

    Args:
        training: question and answer.
        evaluation: question, answer, question type.

    Returns:
        `baseline/<predictor>/accuracy` and `baseline/<predictor>/accuracy/<question type>`.
    """
    overall: Counter[str] = Counter()
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    for question, answer in training:
        overall[answer] += 1
        by_question[question][answer] += 1
    majority = _most_common(overall)
    predictors: dict[str, Callable[[str], str]] = {
        "majority": lambda question: majority,
        "language_only": lambda question: _most_common(by_question[question]) if question in by_question else majority,
    }
    scores: dict[str, float] = {}
    for name, predict in predictors.items():
        right: dict[str, list[bool]] = defaultdict(list)
        for question, answer, kind in evaluation:
            hit = predict(question) == answer
            right["accuracy"].append(hit)
            right[f"accuracy/{kind}"].append(hit)
        scores |= {f"baseline/{name}/{key}": sum(hits) / len(hits) for key, hits in right.items()}
    return scores


def _most_common(counts: Counter[str]) -> str:
    """The most frequent answer; of equally frequent ones the first in the alphabet, so that it is reproducible."""
    return min(counts, key=lambda answer: (-counts[answer], answer))
