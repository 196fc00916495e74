"""Options of the built-in tasks. No torch here."""

from __future__ import annotations

from pydantic import Field

from lavis_ds.config.schema import TaskConfig


class InstructConfig(TaskConfig):
    """Next-token prediction on the labelled tokens; evaluation gives loss and token accuracy."""

    name: str = "instruct"


class VQAConfig(InstructConfig):
    """As `instruct`; evaluation generates an answer to each question and compares it: exact match, by question type."""

    name: str = "vqa"
    baselines: bool = Field(False, description="also score guessing from the training answers, without pictures")
    max_new_tokens: int = Field(16, ge=1, description="longest generated answer, in tokens")
