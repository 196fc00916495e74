"""What the built-in tasks make of a batch, with a model that answers what it is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lavis_ds.batch import Batch, DatasetCounts
from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.tasks.base import EvalContext
from lavis_ds.tasks.configs import InstructConfig, VQAConfig
from lavis_ds.tasks.instruct import InstructTask
from lavis_ds.tasks.vqa import VQATask, normalize

ANSWERS = {7: "Red.", 8: "blue", 9: " a  Circle "}
CONTEXT = EvalContext(synced=True, stop_ids=(1, 2), decode=lambda ids: " ".join(ANSWERS[i] for i in ids))


def batch(rows: int, ids: tuple[str, ...] = (), references: tuple[dict[str, Any] | None, ...] | None = None) -> Batch:
    tokens = torch.zeros(rows, 3, dtype=torch.int64)
    return Batch(
        input_ids=tokens, labels=tokens, position_ids=tokens, attention_mask=tokens == 0, images=None,
        image_index=tokens[0], target_index=tokens[0], num_targets=5, target_weight=5.0, num_tokens=3 * rows,
        sample_ids=ids, positions=(), by_dataset=(DatasetCounts("d"),), references=references,
    )  # fmt: skip


class Model(nn.Module):
    """Gives a fixed loss; generates the row's entry of `ids`."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids, self.options = ids, {}

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        return torch.tensor(10.0), torch.tensor(2.0), torch.tensor(99.0)

    def generate(self, batch: Batch, **options: Any) -> Tensor:
        self.options = options
        return torch.tensor(self.ids)[:, None]


def test_instruct_gives_sums() -> None:
    task = InstructTask(InstructConfig())
    output = task.train_step(Model([]), batch(2))
    assert float(output.loss_sum) == 10.0
    assert output.metrics == {"train/token_accuracy": (torch.tensor(2.0), 5)}
    assert task.eval_step(Model([]), batch(2), CONTEXT).sums == {"loss": (10.0, 5), "token_accuracy": (2.0, 5)}


def test_vqa_compares_answers_overall_and_by_type_and_skips_fillers() -> None:
    references = (
        {"answer": "red", "question_type": "color", "question": "color?", "images": ["/a.png"]},
        {"answer": "red", "question_type": "color"},
        {"answer": "a circle"},
        None,
    )
    task, model = VQATask(VQAConfig(max_new_tokens=3)), Model([7, 8, 9, 7])
    output = task.eval_step(model, batch(4, ("a", "b", "c"), references), CONTEXT)
    assert output.sums == {"accuracy": (2.0, 3), "accuracy/color": (1.0, 2), "accuracy/all": (1.0, 1)}
    assert output.predictions[0] == {
        "id": "a", "images": ["/a.png"], "question": "color?", "answer": "red", "prediction": "Red.", "correct": True,
        "question_type": "color",
    }  # fmt: skip
    assert [p["correct"] for p in output.predictions] == [True, False, True]
    assert model.options == {
        "max_new_tokens": 3, "do_sample": False, "eos_token_id": [1, 2], "synced_gpus": True,
    }  # fmt: skip


def test_vqa_trains_like_instruct_and_is_evaluated_on_prompts() -> None:
    assert VQATask.train_step is InstructTask.train_step
    assert (VQATask.eval_batches, InstructTask.eval_batches) == ("prompts", "labelled")


@pytest.mark.parametrize(
    ("given", "same"),
    [("Yes.", "yes"), ("  red\n circle ", "red circle"), ("3.5", "3.5"), ("no..", "no"), ("", "")],
)
def test_normalize(given: str, same: str) -> None:
    assert normalize(given) == same


def test_normalize_keeps_what_matters() -> None:
    assert normalize("not red") != normalize("red")


def ask(question: str, answer: str, **references: str) -> Conversation:
    turns = (Turn("user", (Text(question),)), Turn("assistant", (Text(answer),)))
    return Conversation("x", turns, {"answer": answer, **references})


def test_vqa_baselines_only_where_they_are_asked_for() -> None:
    task = VQATask(VQAConfig(baselines=True))
    assert task.compares_with_training
    assert not VQATask(VQAConfig()).compares_with_training
    training = [ask("color?", "red"), ask("color?", "red"), ask("there?", "yes")]
    scores = task.baselines(training, [ask("there?", "yes", question_type="yes_no"), ask("color?", "red")])
    assert scores == {
        "baseline/majority/accuracy": 0.5,
        "baseline/majority/accuracy/yes_no": 0.0,
        "baseline/majority/accuracy/all": 1.0,
        "baseline/language_only/accuracy": 1.0,
        "baseline/language_only/accuracy/yes_no": 1.0,
        "baseline/language_only/accuracy/all": 1.0,
    }
