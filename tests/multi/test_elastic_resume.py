"""A run goes on at another number of ranks, ZeRO stage and engine, with the losses it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import RanksFailed, run_ranks
from tests.multi.runs import train
from tests.multi.test_same_loss import ZERO
from tests.tiny_project import make_project, metrics

STEPS, STOP = 9, 5  # step 5 is mid-epoch 2


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"batching": "packed", "plan_window": 16}
    return make_project(tmp_path_factory.mktemp("project"), data=data, num_datasets=2, max_steps=STEPS, save_every=None)


def run(project: Path, job: str, ranks: int, options: list[str], resume: str | None = None) -> list[dict[str, Any]]:
    chosen = [*options, f"run.batch_size_train={4 // ranks}"]
    codes = run_ranks(train, ranks, str(project), chosen, job, resume, timeout_s=150, join_group=False)
    assert set(codes) <= {0, 75}
    return metrics(project.parent / "output" / job)


@pytest.fixture(scope="module")
def uninterrupted(project: Path) -> list[dict[str, Any]]:
    return run(project, "whole", 1, ["run.engine=torch"])


ENGINES = {"torch": ["run.engine=torch"], **{f"zero{stage}": [ZERO[stage]] for stage in range(4)}}
OFFLOAD = "run.deepspeed_config={preset: zero2_offload}"
CASES = [
    (2, "zero3", 1, "zero1"),
    (1, "zero1", 4, "zero3"),
    (2, "torch", 1, "zero0"),
    pytest.param(4, "zero2", 2, "zero2", marks=pytest.mark.slow),
    pytest.param(1, "zero0", 2, "torch", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "engine", "new_ranks", "new_engine"), CASES)
def test_losses_and_samples_are_those_of_the_uninterrupted_run(
    ranks: int, engine: str, new_ranks: int, new_engine: str, project: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    """Largest difference of losses seen: 3e-7."""
    job = f"{engine}_{ranks}_{new_engine}_{new_ranks}"
    run(project, job, ranks, [*ENGINES[engine], f"run.stop_at_step={STOP}"])
    lines = run(project, job, new_ranks, ENGINES[new_engine], "auto")
    assert len(lines) == len(uninterrupted) == STEPS
    for ours, theirs in zip(lines, uninterrupted, strict=True):
        assert ours["data/sample_ids"] == theirs["data/sample_ids"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)


def test_16_bit_masters_go_on_unrounded(project: Path) -> None:
    """Float32 masters and moments pass through the files: bf16 runs that changed their layout lose nothing."""
    whole = run(project, "bf16_whole", 2, [ZERO[2], "run.precision=bf16"])
    run(project, "bf16", 2, [ZERO[2], "run.precision=bf16", f"run.stop_at_step={STOP}"])
    lines = run(project, "bf16", 2, [ZERO[3], "run.precision=bf16"], "auto")
    differences = [abs(a["train/loss"] - b["train/loss"]) for a, b in zip(lines, whole, strict=True)]
    print("largest difference", max(differences))
    assert max(differences) < 2e-3


@pytest.mark.slow
def test_killed_while_checkpoints_are_written_in_the_background(
    project: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    options = [*ENGINES["zero3"], "run.save_in_background=true", "run.save_every=1", "run.batch_size_train=2"]
    with pytest.raises(RanksFailed):
        run_ranks(train, 2, str(project), options, "behind", None, 6, timeout_s=150, join_group=False)
    newest = (project.parent / "output" / "behind" / "checkpoints" / "latest").read_text()
    assert "step_00000003" <= newest <= "step_00000006"
    lines = run(project, "behind", 2, options[:-1], "auto")
    for ours, theirs in zip(lines, uninterrupted, strict=True):
        assert ours["data/sample_ids"] == theirs["data/sample_ids"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
