"""Weights that ZeRO-3 keeps in files are those that it keeps in memory: the same losses, and an exact resume."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.multi.launch import CPU_ONLY, run_ranks
from tests.multi.runs import train
from tests.multi.test_resume import what_matters
from tests.tiny_project import make_project, metrics

STEPS = 6
ZERO = (
    "run.deepspeed_config.zero_optimization={{stage: 3, offload_optimizer: {{device: cpu}}, offload_param: {where}, "
    "stage3_param_persistence_threshold: 0}}"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose feed-forward layers have shares of 1 MiB, the least that DeepSpeed writes to a file."""
    if ctypes.util.find_library("aio") is None:
        pytest.skip("libaio is not installed")
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=900, env={**os.environ, **CPU_ONLY})
    cfg = make_project(tmp_path_factory.mktemp("project"), max_steps=STEPS, save_every=3, num_workers=0)
    tree = yaml.safe_load(cfg.read_text())
    tree["model"]["language"]["config"] |= {"hidden_size": 128, "intermediate_size": 4096, "head_dim": 64}
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


@pytest.mark.slow
@pytest.mark.timeout(1500)  # DeepSpeed's way to the disk is compiled once a machine, for minutes
def test_losses_and_resume_are_those_of_weights_in_memory(project: Path, tmp_path: Path) -> None:
    def run(job_id: str, where: str, *more: str, resume: str | None = None) -> list[int]:
        options = [ZERO.format(where=where), "run.batch_size_train=2", *more]
        return run_ranks(train, 2, str(project), options, job_id, resume, timeout_s=150, join_group=False)

    on_nvme, output = f"{{device: nvme, nvme_path: {tmp_path}}}", project.parent / "output"
    assert run("memory", "{device: cpu}") == [0, 0]
    assert run("nvme", on_nvme) == [0, 0]
    assert len([path for path in tmp_path.rglob("*.swp") if path.stat().st_size >= 2**20]) >= 2
    assert what_matters(metrics(output / "nvme")) == what_matters(metrics(output / "memory"))
    assert run("broken", on_nvme, "run.stop_at_step=4") == [75, 75]
    assert run("broken", on_nvme, resume="auto") == [0, 0]
    assert what_matters(metrics(output / "broken")) == what_matters(metrics(output / "nvme"))
