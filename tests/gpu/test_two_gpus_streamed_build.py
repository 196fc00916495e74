"""On two GPUs, through NCCL, ZeRO-3 has the weights of a model that every rank holds whole, and its GPUs never do.

pytest -m gpu2 tests/gpu/test_two_gpus_streamed_build.py
LAVIS_DS_TEST_DEVICE=cpu pytest -m gpu2 tests/gpu/test_two_gpus_streamed_build.py      # tries them over gloo
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.multi.launch import DEVICE, run_ranks
from tests.multi.test_streamed_build import STAGE, WIDE, ZERO, engines
from tests.tiny_project import make_project

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(600)]

ON_CPU = os.environ.get(DEVICE) == "cpu"


def test_engines_have_the_weights_of_a_whole_model_and_those_that_are_restored(tmp_path: Path) -> None:
    cfg, empty = make_project(tmp_path), tmp_path / "empty"
    empty.mkdir()
    for rank in run_ranks(engines, 2, str(cfg), str(empty), timeout_s=300, join_group=False, cpu_only=False):
        assert rank == [([], [])] * len(ZERO)


def peak(cfg: str) -> tuple[int, int]:
    """Bytes of the weights in bf16, and the most that was on the GPU until they were ZeRO-3's."""
    from lavis_ds import distributed
    from lavis_ds.config.load import load
    from lavis_ds.engines import ds_partition
    from lavis_ds.engines.ds_config import batch_plan
    from lavis_ds.optim.groups import param_groups
    from lavis_ds.runners import build

    distributed.initialize(120)
    config = load(cfg, [f"{STAGE}=3", "run.precision=bf16"]).config
    model = build.build_model(config, in_shares=build.trains_in_shares(config))
    size = 2 * sum(p.numel() for p in model.parameters())
    partition, peaks = ds_partition.partition, []

    def watched(*args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        partition(*args)
        peaks.append(torch.cuda.max_memory_allocated())

    ds_partition.partition = watched
    build.build_engine(config, model, param_groups(model, config.run), batch_plan(config.run, 2))
    return size, peaks[0]


@pytest.mark.skipif(ON_CPU, reason="memory of GPUs")
def test_a_gpu_has_its_share_and_two_of_the_largest_tensors(tmp_path: Path) -> None:
    cfg = make_project(tmp_path)
    tree = yaml.safe_load(cfg.read_text())
    tree["model"]["language"]["config"] |= WIDE
    cfg.write_text(yaml.safe_dump(tree))
    for size, most in run_ranks(peak, 2, str(cfg), timeout_s=300, join_group=False, cpu_only=False):
        print(f"{most / size:.2f} of the model")
        assert most < 0.8 * size  # 0.5 is the share; a tensor in float32 has 0.08, and its copies as much again
