"""Recomputation and tiles on two ranks under ZeRO: the backward pass gathers weights anew, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import run_ranks
from tests.multi.runs import Job, train_all
from tests.tiny_project import make_project, metrics

WAYS = {
    "none": [],
    "selective": ["model.language.gradient_checkpointing=selective", "model.vision.gradient_checkpointing=selective"],
    "tiled": [
        "model.language.gradient_checkpointing=every_2", "model.language.offload_activations=true",
        "model.language.mlp_tiles=3", "model.vision.gradient_checkpointing=full",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Job -> metrics; the rows of the two ranks have different lengths."""
    project = make_project(tmp_path_factory.mktemp("project"), max_steps=4, save_every=None)
    jobs = [
        Job(str(project), f"{way}_{stage}", (f"run.deepspeed_config.zero_optimization.stage={stage}", *options))
        for way, options in WAYS.items()
        for stage in (2, 3)
    ]
    assert run_ranks(train_all, 2, jobs, timeout_s=250, join_group=False) == [[0] * len(jobs)] * 2
    return {job.job_id: metrics(Path(job.cfg).parent / "output" / job.job_id) for job in jobs}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["selective", "tiled"])
def test_same_losses(way: str, stage: int, lines: dict[str, list[dict[str, Any]]]) -> None:
    expected, found = lines["none_2"], lines[f"{way}_{stage}"]
    assert len(found) == len(expected) == 4
    for ours, other in zip(found, expected, strict=True):
        assert ours["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)  # measured 0
        assert ours["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-5)  # measured 1e-7
