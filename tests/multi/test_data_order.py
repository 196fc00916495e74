"""Killed anywhere and resumed on any number of ranks, a run sees exactly the samples that were left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.multi.launch import RanksFailed, run_ranks
from tests.multi.runs import train
from tests.tiny_project import make_project, metrics

STEPS = 12
TORCH = ["run.engine=torch"]


def samples(cfg: Path, job: str) -> list[list[str]]:
    return [line["data/sample_ids"] for line in metrics(cfg.parent / "output" / job)]


@pytest.fixture(scope="module", params=["packed", pytest.param("grouped", marks=pytest.mark.slow)])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets mixed three to one, with windows that straddle epochs."""
    data = {"batching": request.param, "plan_window": 10}
    cfg = make_project(
        tmp_path_factory.mktemp(request.param), data=data, num_datasets=2, max_steps=STEPS, save_every=2,
        global_batch_size=4, batch_size_train=1,
    )  # fmt: skip
    text = cfg.read_text().replace("builder: llava_json", "builder: llava_json\n    repeat: 1.5", 1)
    cfg.write_text(text)
    return cfg


def test_resumed_on_other_numbers_of_ranks_it_sees_the_samples_that_were_left(project: Path) -> None:
    """Killed four times, each time at another step, and gone on with 2, 4, 1 and 2 ranks and other workers."""
    run_ranks(train, 1, str(project), TORCH, "whole", None, timeout_s=150, join_group=False)
    expected = samples(project, "whole")
    assert len(expected) == STEPS
    rng = random.Random(0)
    at = 0
    for ranks, workers in [(2, 2), (4, 0), (1, 1)]:
        at = min(STEPS - 1, at + rng.randint(3, 4))
        with pytest.raises(RanksFailed):
            run_ranks(
                train, ranks, str(project), [*TORCH, f"run.num_workers={workers}"], "broken", "auto", at,
                timeout_s=150, join_group=False,
            )  # fmt: skip
        assert samples(project, "broken") == expected[:at]
    codes = run_ranks(
        train, 2, str(project), [*TORCH, "run.num_workers=2"], "broken", "auto", timeout_s=150, join_group=False
    )
    assert codes == [0, 0]
    assert samples(project, "broken") == expected
    losses = [[line["train/loss"] for line in metrics(project.parent / "output" / job)] for job in ("broken", "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # measured 5e-7
