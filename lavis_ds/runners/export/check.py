"""The proof: a fresh process loads the folder with plain transformers, and computes what our model does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import CheckpointError
from lavis_ds.models.adapters import merge_adapters
from lavis_ds.models.base import Model
from lavis_ds.runners import build
from lavis_ds.runners.evaluate import evaluation_mode
from lavis_ds.runners.export.samples import Question, questions
from lavis_ds.runners.export.target import Target

TOLERANCE = 1e-5
"""Largest difference of logits computed in float32, as a share of the largest logit, or of 1 where all are smaller."""
_PIXEL_LEVELS = 2.0
"""Largest difference of pixels on average, in levels of 0..255: more is another way of resizing, not another kernel."""


@dataclass(frozen=True)
class Agreement:
    """How far the exported model and its processor are from ours, on one sample.

    Attributes:
        name: of the sample.
        logits: largest difference.
        largest_logit: what that is compared with.
        pixels_mean: mean difference of pixels, in levels of 0..255; None without a picture.
        pixels_max: the largest.
    """

    name: str
    logits: float
    largest_logit: float
    pixels_mean: float | None = None
    pixels_max: float | None = None

    def __str__(self) -> str:
        text = f"{self.name}: logits differ by at most {self.logits:.1e} (the largest is {self.largest_logit:.1f})"
        if self.pixels_mean is None:
            return f"{text}; same input ids"
        pixels = f"pixels differ by {self.pixels_mean:.2f} of 255 on average, {self.pixels_max:.0f} at most"
        return f"{text}; same input ids; {pixels}"


@dataclass(frozen=True)
class Expected:
    """What our model and processors make of one sample."""

    question: Question
    inputs: dict[str, Tensor]
    logits: Tensor


def expected(
    config: RootConfig, entry: str, target: Target, work: Path, dtype: torch.dtype, *, merge: bool
) -> list[Expected]:
    """What our model computes, in float32, from the weights as they are exported.

    Args:
        config: the run, with the checkpoint as `model.pretrained`.
        entry: of `datasets:`, whose processors are used.
        target: what the model becomes.
        work: folder for the picture.
        dtype: of the exported weights.
        merge: whether adapters were added to the weights before these were rounded.
    """
    model = build.build_model(config)
    if dtype != torch.float32:  # else adapters stay beside the weights here, and that they were added shows
        if merge:
            merge_adapters(model)
        _round(model, dtype)
    with evaluation_mode(model):
        return [
            Expected(question, question.tensors(model, target), _logits(model, question))
            for question in questions(config, entry, model, target, work)
        ]


def compare(folder: Path, samples: list[Expected], target: Target, work: Path) -> list[Agreement]:
    """Load `folder` in a fresh process and compare.

    Raises:
        CheckpointError: it can't be loaded, something is missing, or what it computes differs.
    """
    for number, sample in enumerate(samples):
        save_file({name: t.contiguous() for name, t in sample.inputs.items()}, work / f"{number}.in.safetensors")
    (work / "request.json").write_text(json.dumps([_request(sample.question) for sample in samples]))
    report = _reload(folder, work)
    _check_report(report, folder, target)
    return [
        _agreement(sample, load_file(work / f"{number}.out.safetensors"), target, folder)
        for number, sample in enumerate(samples)
    ]


def _logits(model: Any, question: Question) -> Tensor:
    logits: Tensor = model.language.logits(model.hidden_states(question.batch)[:, : question.length])
    return logits


def _round(model: Model, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))


def _request(question: Question) -> dict[str, Any]:
    picture = str(question.picture) if question.picture else None
    return {"picture": picture, "messages": question.messages, "text": question.text}


def _reload(folder: Path, work: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("reload.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # the folder alone must do
    command = [sys.executable, "-P", str(script), str(folder), str(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CheckpointError(
            "plain transformers can't load the exported folder or run its model.",
            where=str(folder),
            given="\n".join(lines[-3:]) or f"exit code {done.returncode}",
        )
    report: dict[str, Any] = json.loads((work / "report.json").read_text())
    return report


def _check_report(report: dict[str, Any], folder: Path, target: Target) -> None:
    skeleton = target.skeleton()
    tied = skeleton.get_input_embeddings().weight is skeleton.get_output_embeddings().weight
    wanted = {"class": target.model_class.__name__, "problems": {}, "tied_embeddings": tied}
    if report != wanted:
        raise CheckpointError(
            "the exported folder is not complete.",
            where=str(folder),
            given=json.dumps(report),
            expected=json.dumps(wanted),
        )


def _agreement(sample: Expected, found: dict[str, Tensor], target: Target, folder: Path) -> Agreement:
    name, ids = sample.question.name, sample.inputs["input_ids"]
    ours = sample.logits
    theirs = found["logits"][..., : ours.shape[-1]]  # without rows that only `<image>` needed
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CheckpointError(
            f"the exported model computes something else ({name}).",
            where=str(folder),
            given=f"logits that differ by up to {difference:.1e}, where the largest is {largest:.1f}",
            expected=f"a difference of at most {TOLERANCE:g} of the largest",
            hint=" ".join(target.notes) or "The folder is left as it is, to be looked at.",
        )
    if found["input_ids"].tolist() != ids.tolist():
        raise CheckpointError(
            f"the exported processor makes other input ids of the same question ({name}).",
            where=str(folder),
            given=str(found["input_ids"].flatten().tolist()[:60]),
            expected=str(ids.flatten().tolist()[:60]),
        )
    if sample.question.picture is None:
        return Agreement(name, difference, largest)
    pixels = _pixels(sample.inputs["pixel_values"], found["pixel_values"], target, folder)
    return Agreement(name, difference, largest, *pixels)


def _pixels(ours: Tensor, theirs: Tensor, target: Target, folder: Path) -> tuple[float, float]:
    """Mean and largest difference, in levels of 0..255; pictures are (N, 3, H, W) or patches (P, D), channels first."""
    mean = most = 255.0
    if ours.shape == theirs.shape:
        by_channel = (theirs - ours).abs().reshape(len(ours), 3, -1)
        levels = by_channel * torch.tensor(target.std).view(3, 1) * 255
        mean, most = float(levels.mean()), float(levels.max())
    if mean > _PIXEL_LEVELS:
        raise CheckpointError(
            "the exported processor makes other pixels of the same picture.",
            where=str(folder),
            given=f"shape {tuple(theirs.shape)}, {mean:.1f} of 255 away on average, {most:.0f} at most",
            expected=f"shape {tuple(ours.shape)}, at most {_PIXEL_LEVELS:g} away on average",
        )
    return mean, most
