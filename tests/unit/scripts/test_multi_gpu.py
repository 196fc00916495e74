"""What the benchmark of two GPUs makes of its runs' numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch

from scripts.benchmarks import multi_gpu
from scripts.benchmarks.measured_run import covered

G = 2**30


@pytest.mark.parametrize(
    ("stage", "gpus", "bytes_a_parameter"),
    [(0, 1, 16), (1, 1, 16), (0, 2, 16), (1, 2, 10), (2, 2, 9), (3, 2, 8), (3, 4, 4)],
)
def test_memory_by_stage(stage: int, gpus: int, bytes_a_parameter: float) -> None:
    assert sum(multi_gpu.formula(stage, gpus, 3 * G).values()) == 3 * bytes_a_parameter


def row(gpus: int, tokens_per_s: int) -> dict[str, object]:
    sizes = {"parameters": 2 * G, "held_bytes": 21 * G, "peak_gib": 40.0}
    times = {"step_s": 0.5, "only_talking_s": 0.025, "busy_s": 0.49}
    return {"model": "2B", "stage": "ZeRO-2", "gpus": gpus, "tokens_per_s": tokens_per_s, **times, **sizes}


def test_tables() -> None:
    failed = {"model": "8B", "stage": "ZeRO-3", "gpus": 2, "exit_code": 1, "error": "no room"}
    found = multi_gpu.tables({"rows": [failed, row(2, 39_000), row(1, 20_000)]}).splitlines()
    assert "| 2B | ZeRO-2 | 20,000 | 39,000 | 97.5% | 0.500 s | 0.025 s | 0.010 s |" in found
    assert "| 8B | ZeRO-3 |  |  |  |  |  |  |" in found
    assert "| 2B | ZeRO-2 | 1 | 4.0 | 4.0 | 24.0 | 32.0 | 0% | 21.0 (28.0) | 40.0 | 8.0 |" in found
    assert "| 2B | ZeRO-2 | 2 | 4.0 | 2.0 | 12.0 | 18.0 | 44% | 21.0 (16.0) | 40.0 | 22.0 |" in found


def test_runs_of_one_gpu_go_side_by_side() -> None:
    stages = ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
    arguments = argparse.Namespace(models=["2B", "8B"], stages=stages, at_once=2, gpus=[1, 2])
    jobs = [[run.job for run in together] for together in multi_gpu.runs(arguments)]
    assert jobs[:3] == [["2b_zero1_x1", "2b_zero2_x1"], ["2b_zero3_x1"], ["2b_zero1_x2"]]
    assert len(jobs) == 2 + 3 + 3, "the 8B has no room on one GPU"


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4


@pytest.fixture
def quick() -> Iterator[None]:
    normal, uniform = torch.Tensor.normal_, torch.Tensor.uniform_
    from scripts.benchmarks import quick_weights

    torch.Tensor.normal_, torch.Tensor.uniform_ = quick_weights.normal_, quick_weights.uniform_  # type: ignore[assignment, method-assign]
    yield
    torch.Tensor.normal_, torch.Tensor.uniform_ = normal, uniform  # type: ignore[method-assign]


@pytest.mark.usefixtures("quick")
def test_quick_weights_have_the_mean_and_width_that_were_asked_for() -> None:
    weight = torch.nn.Linear(2000, 1500, bias=False).weight
    assert weight.abs().max() <= 2000**-0.5
    assert weight.std().item() == pytest.approx((2000 * 3) ** -0.5, rel=0.01)
    torch.nn.init.normal_(weight, 1.0, 0.02)
    assert weight.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    torch.nn.init.trunc_normal_(weight, std=0.02)
    assert weight.isfinite().all()
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
