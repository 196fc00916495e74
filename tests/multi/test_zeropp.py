"""ZeRO++ as far as it runs without CUDA: shards that every machine keeps too (hpZ) change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.launch import run_ranks
from tests.multi.runs import Job, train_all
from tests.multi.test_same_loss import ZERO
from tests.tiny_project import make_project, metrics

STEPS, STOP = 8, 4
HPZ = "run.deepspeed_config.zero_optimization={stage: 3, zero_hpz_partition_size: 2}"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_losses_are_those_of_zero_3_and_go_on_exactly(precision: str, tmp_path: Path) -> None:
    cfg = str(make_project(tmp_path, max_steps=STEPS, save_every=None))
    often = (f"run.precision={precision}", "run.batch_size_train=4")
    stop = f"run.stop_at_step={STOP}"
    jobs = [
        Job(cfg, "plain", (ZERO[3], *often)),
        Job(cfg, "whole", (HPZ, *often)),
        Job(cfg, "cut", (HPZ, *often, stop)),
        Job(cfg, "cut", (HPZ, *often), "auto"),
    ]
    for job in jobs:  # each in processes of its own: DeepSpeed makes the group of a machine's ranks once
        codes = run_ranks(train_all, 2, [job], timeout_s=300, join_group=False)
        assert codes == [[75 if stop in job.options else 0]] * 2
    plain, whole, cut = (
        [(line["train/loss"], line["train/grad_norm"]) for line in metrics(tmp_path / "output" / job)]
        for job in ("plain", "whole", "cut")
    )
    assert whole == plain
    assert cut == whole
