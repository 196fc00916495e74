"""Pictures with what was asked, what the model said and what is right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lavis_ds.runners.report.pictures import NO_PICTURE, Picture, embed
from lavis_ds.runners.report.read import Evaluation, Run

THUMBNAIL = 160


@dataclass(frozen=True)
class Example:
    """One sample of the gallery."""

    pictures: list[Picture]
    sample_id: str
    question: str
    answer: str
    prediction: str
    is_correct: bool | None
    question_type: str


@dataclass(frozen=True)
class Gallery:
    """Examples of one evaluation: `len(examples)` of `total`, evenly spaced whatever the answers are."""

    run_name: str
    split: str
    step: int
    total: int
    examples: list[Example]


def galleries(run: Run, limit: int) -> list[Gallery]:
    """The newest predictions of each split, at most `limit` examples together."""
    evaluations = [e for e in run.last_evaluations() if e.predictions.exists()]
    return [g for e in evaluations if (g := _gallery(run, e, max(1, limit // len(evaluations)))).examples]


def _gallery(run: Run, evaluation: Evaluation, limit: int) -> Gallery:
    lines = evaluation.predictions.read_text(encoding="utf-8", errors="replace").splitlines()
    chosen = np.unique(np.linspace(0, len(lines) - 1, min(len(lines), limit)).astype(int))
    records = [record for i in chosen if (record := _record(lines[i])) is not None]
    if len(records) < len(chosen):
        run.notes.append(f"eval/{evaluation.predictions.name} has unreadable lines, left out.")
    folders = list(_picture_folders(run))
    examples = [_example(record, folders) for record in records]
    return Gallery(run.name, evaluation.split, evaluation.step, len(lines), examples)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _picture_folders(run: Run) -> Iterable[Path]:
    """Where a relative picture path may start: the working directory, the run folder, the datasets' image folders."""
    yield from (Path(), run.folder)
    datasets = run.config.get("datasets")
    for dataset in datasets.values() if isinstance(datasets, dict) else ():
        if isinstance(dataset, dict) and dataset.get("image_root"):
            yield Path(str(dataset["image_root"]))


def _example(record: dict[str, Any], folders: Sequence[Path]) -> Example:
    correct = record.get("correct")
    images = record.get("images")
    return Example(
        pictures=[_picture(str(path), folders) for path in images] if isinstance(images, list) else [],
        sample_id=str(record.get("id", "")),
        question=str(record.get("question", "")),
        answer=str(record.get("answer", "")),
        prediction=str(record.get("prediction", "")),
        is_correct=None if correct is None else bool(correct),
        question_type=str(record.get("question_type") or ""),
    )


def _picture(path: str, folders: Sequence[Path]) -> Picture:
    found = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if found is None:
        return NO_PICTURE
    try:
        with Image.open(found) as image:
            return embed(image, THUMBNAIL)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises on damaged files
        return NO_PICTURE
