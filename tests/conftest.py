"""Settings of every test: one thread a process, no hub, the CPU unless a test is marked for GPUs."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before anything imports torch, numpy or transformers, which read these once. Processes that tests start inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

# Token counts and indices are kept apart from the user's own.
os.environ["LAVIS_DS_CACHE"] = tempfile.mkdtemp(prefix="lavis_ds_tests_")

MULTI = Path(__file__).parent / "multi"
MULTI_TIMEOUT_S = 600
"""Ranks have shorter time-outs of their own, which say more."""


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["LAVIS_DS_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(MULTI):
            item.add_marker(pytest.mark.multi)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(MULTI_TIMEOUT_S))


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, such as the default `output/`, end in the test's own folder."""
    monkeypatch.chdir(tmp_path)
