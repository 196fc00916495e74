"""Optimizers other than AdamW on two GPUs: matrices that both hold travel through NCCL, shares of states go on.

pytest -m gpu2 tests/gpu/test_two_gpus_optimizers.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.test_optimizers import RUNS, STEPS, STOP, largest_difference, lines, losses, trained
from tests.tiny_project import make_project

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(900)]

REFERENCES = ["adamw", "muon torch"]
BF16 = [name for name, options in RUNS[2].items() if "run.precision=bf16" in options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = make_project(tmp_path_factory.mktemp("project"), max_steps=STEPS)
    return trained(project, [*REFERENCES, *RUNS[2]], cpu_only=False)


@pytest.mark.parametrize("name", RUNS[2])
def test_losses_follow_one_gpu_in_float32(name: str, folder: Path) -> None:
    reference = losses(lines(folder, REFERENCES[name.startswith("muon")]))
    assert largest_difference(losses(lines(folder, name)), reference) < (0.02 if name in BF16 else 2e-3)


@pytest.mark.parametrize("name", RUNS[2])
def test_goes_on(name: str, folder: Path) -> None:
    assert largest_difference(losses(lines(folder, name, "resumed")), losses(lines(folder, name))) < 2e-3


@pytest.mark.parametrize("name", ["muon x2 zero1", "rounded x2 zero3"])
def test_goes_on_on_one_gpu(name: str, folder: Path) -> None:
    difference = largest_difference(losses(lines(folder, name, "elastic")), losses(lines(folder, name), STOP))
    assert difference < 5e-3
