"""The shipped projects on one GPU, from YAML to score."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def command(*arguments: str, folder: Path, timeout_s: int) -> None:
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, timeout=timeout_s)


def test_quickstart_answers_unseen_questions(tmp_path: Path) -> None:
    command(str(ROOT / "projects/quickstart/prepare.py"), folder=tmp_path, timeout_s=60)
    cfg = str(ROOT / "projects/quickstart/train.yaml")
    options = runpy.run_path(str(ROOT / "scripts/quickstart.py"))["ONE_GPU"]
    arguments = ["train", "--cfg", cfg, "--job-id", "gpu", "--options", *options]
    command("-c", "from lavis_ds.cli import entry_point; entry_point()", *arguments, folder=tmp_path, timeout_s=240)
    (scores,) = (tmp_path / "output/quickstart/gpu/eval").glob("test_step_*.json")
    metrics = json.loads(scores.read_text())["metrics"]
    assert metrics["accuracy"] > 0.95
    assert metrics["baseline/language_only/accuracy"] < 0.7


@pytest.mark.skipif("LAVIS_DS_REAL_SMALL" not in os.environ, reason="prepare.py has not been run")
def test_real_small_learns_in_both_stages(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/real_small").symlink_to(os.environ["LAVIS_DS_REAL_SMALL"])
    script = str(ROOT / "scripts/train.py")
    for stage in ("stage1", "stage2"):
        cfg = str(ROOT / f"projects/real_small/{stage}.yaml")
        command(script, "--cfg", cfg, "--job-id", stage, folder=tmp_path, timeout_s=400)
    (scores,) = (tmp_path / "output/real_small/stage2/eval").glob("test_step_*.json")
    metrics = json.loads(scores.read_text())["metrics"]
    assert metrics["accuracy"] > metrics["baseline/language_only/accuracy"] + 0.1
