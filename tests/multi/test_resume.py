"""Killed and started again, a run goes on as if nothing had happened: bit for bit, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import RanksFailed, run_ranks
from tests.multi.runs import train
from tests.tiny_project import make_project, metrics

KILL_AT = 6  # epoch 2 is steps 2.75 to 5.5, epoch 3 starts in step 6; the newest checkpoint then is step 4, mid-epoch 2
STEPS = 9


def what_matters(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything but wall-clock times and memory."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/", "memory/"))} for line in lines]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), max_steps=STEPS, save_every=2, num_workers=2)


CASES = [
    *((2, engine) for engine in ("zero2", "zero3", "torch", "zero3_offload")),
    *(pytest.param(2, engine, marks=pytest.mark.slow) for engine in ("zero0", "zero1", "zero2_offload")),
    *(pytest.param(1, engine, marks=pytest.mark.slow) for engine in ("zero0", "zero1", "zero2", "zero3", "torch")),
]
OF_PRESET = "run.deepspeed_config={preset: %s}"


@pytest.mark.parametrize(("ranks", "engine"), CASES)
def test_killed_in_epoch_2_and_resumed_equals_uninterrupted(ranks: int, engine: str, project: Path) -> None:
    if engine == "torch":
        options = ["run.engine=torch"]
    elif engine.endswith("offload"):
        options = [OF_PRESET % engine]
    else:
        options = [f"run.deepspeed_config.zero_optimization.stage={engine[-1]}"]
    options.append(f"run.batch_size_train={4 // ranks}")
    output = project.parent / "output"
    whole, broken = f"{engine}_{ranks}_whole", f"{engine}_{ranks}_broken"

    run_ranks(train, ranks, str(project), options, whole, None, timeout_s=150, join_group=False)
    with pytest.raises(RanksFailed):
        run_ranks(train, ranks, str(project), options, broken, None, KILL_AT - 1, timeout_s=150, join_group=False)
    assert (output / broken / "checkpoints" / "latest").read_text().strip() == "step_00000004"
    assert len(metrics(output / broken)) == KILL_AT - 1
    codes = run_ranks(train, ranks, str(project), options, broken, "auto", timeout_s=150, join_group=False)

    assert codes == [0] * ranks
    assert what_matters(metrics(output / broken)) == what_matters(metrics(output / whole))
    assert _weights(output / broken) == _weights(output / whole)


def _weights(run: Path) -> bytes:
    return (run / "checkpoints" / f"step_{STEPS:08d}" / "weights" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_stop_at_step_saves_and_says_so(project: Path) -> None:
    options = ["run.engine=torch", "run.stop_at_step=3"]
    run_ranks(train, 1, str(project), ["run.engine=torch"], "never_stopped", None, timeout_s=150, join_group=False)
    assert run_ranks(train, 1, str(project), options, "stopped", None, timeout_s=150, join_group=False) == [75]
    assert len(metrics(project.parent / "output" / "stopped")) == 3
    resumed = run_ranks(
        train, 1, str(project), ["run.engine=torch"], "stopped", "auto", timeout_s=150, join_group=False
    )
    assert resumed == [0]
    output = project.parent / "output"
    assert what_matters(metrics(output / "stopped")) == what_matters(metrics(output / "never_stopped"))
