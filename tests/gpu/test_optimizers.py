"""Optimizers other than AdamW on a GPU: the runs of tests/multi/test_optimizers.py on one, and what they hold there.

pytest -m gpu tests/gpu/test_optimizers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.config.schema import RunConfig
from lavis_ds.optim import optimizers
from tests.multi import test_optimizers as on_cpu
from tests.multi.test_optimizers import RUNS, largest_difference, lines, losses
from tests.tiny_project import make_project

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NAMES = [name for name in RUNS[1] if name != "adamw"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("project"), max_steps=on_cpu.STEPS)
    return on_cpu.trained(project, RUNS[1], cpu_only=False)


@pytest.mark.parametrize("name", NAMES)
def test_losses_follow_those_in_float32(name: str, folder: Path) -> None:
    reference = "muon torch" if name.startswith("muon") else "adamw"
    difference = largest_difference(losses(lines(folder, name)), losses(lines(folder, reference)))
    assert difference < (0.02 if "bf16" in name or "rounded" in name else 2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_goes_on(name: str, folder: Path) -> None:
    """Exactly but for the order in which a GPU adds up gradients of the embedding."""
    assert largest_difference(losses(lines(folder, name, "resumed")), losses(lines(folder, name))) < 2e-3


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.float32, 8),
        ({"name": "adamw_8bit"}, torch.float32, 2 + 8 / 256),
        ({"name": "muon"}, torch.float32, 4),
        ({"stochastic_rounding": True}, torch.bfloat16, 4),
    ],
)
def test_bytes_of_state_a_parameter(options: dict[str, Any], dtype: torch.dtype, expected: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(4096, 4096, dtype=dtype, device="cuda"))
    run = RunConfig.model_validate({"max_steps": 1, "batch_size_train": 1, "optimizer": options})
    group = {"params": [weight], "weight_decay": 0.0, "uses_muon": options.get("name") == "muon"}
    optimizer = optimizers.build([group], run)
    weight.grad = torch.zeros_like(weight)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    held = (torch.cuda.memory_allocated() - before) / weight.numel()
    assert held == pytest.approx(expected, rel=0.01)
