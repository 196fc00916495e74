"""Visual question answering: trains like `instruct`, is judged by the answers it generates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lavis_ds.batch import Batch
from lavis_ds.data.conversation import Conversation
from lavis_ds.tasks.base import EvalContext, EvalOutput
from lavis_ds.tasks.baselines import answer_priors, pairs
from lavis_ds.tasks.configs import VQAConfig
from lavis_ds.tasks.instruct import InstructTask


class VQATask(InstructTask):
    """Evaluation: exact match of greedy answers, overall (`accuracy`) and by question type (`accuracy/<type>`).

    A sample's references need `answer`; `question_type` is optional.
    """

    Config = VQAConfig
    config: VQAConfig
    eval_batches = "prompts"

    def eval_step(self, model: nn.Module, batch: Batch, context: EvalContext) -> EvalOutput:
        generate: Any = model.generate
        ids = generate(
            batch,
            max_new_tokens=self.config.max_new_tokens,
            do_sample=False,
            eos_token_id=list(context.stop_ids),
            synced_gpus=context.synced,
        )
        sums: dict[str, tuple[float, float]] = {}
        predictions = []
        for index, sample_id in enumerate(batch.sample_ids):
            record = _record(sample_id, context.decode(ids[index].tolist()), (batch.references or ())[index] or {})
            predictions.append(record)
            for name in ("accuracy", f"accuracy/{record['question_type']}"):
                total, count = sums.get(name, (0.0, 0.0))
                sums[name] = (total + record["correct"], count + 1)
        return EvalOutput(sums, tuple(predictions))

    @property
    def compares_with_training(self) -> bool:
        return self.config.baselines

    def baselines(self, training: Iterable[Conversation], evaluated: Iterable[Conversation]) -> Mapping[str, float]:
        asked = [
            (
                next(pairs([c]))[0],
                str((c.references or {})["answer"]),
                str((c.references or {}).get("question_type", "all")),
            )
            for c in evaluated
        ]
        return answer_priors(pairs(training), asked)


def _record(sample_id: str, prediction: str, references: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": sample_id,
        "images": references.get("images", []),
        "question": references.get("question", ""),
        "answer": references["answer"],
        "prediction": prediction,
        "correct": normalize(prediction) == normalize(str(references["answer"])),
        "question_type": references.get("question_type", "all"),
    }


def normalize(answer: str) -> str:
    """Case, surrounding space and a final full stop do not make an answer wrong."""
    return " ".join(answer.lower().split()).rstrip(".")
