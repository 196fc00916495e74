"""Tests that need more GPUs than there are say so."""

from __future__ import annotations

import os

import pytest

from tests.multi.launch import DEVICE


@pytest.fixture(autouse=True, scope="session")
def _number_of_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(autouse=True)
def _enough_gpus(request: pytest.FixtureRequest, _number_of_gpus: int) -> None:
    if request.node.get_closest_marker("gpu2") and _number_of_gpus < 2 and os.environ.get(DEVICE) != "cpu":
        pytest.skip(f"needs two GPUs, and there is {'one' if _number_of_gpus else 'none'}")
