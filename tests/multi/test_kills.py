"""Killed fifty times at any moment, one rank or all of them, runs end with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.runners.checkpoint_files import complete_ones
from tests.multi.launch import RanksFailed, run_ranks
from tests.multi.runs import train
from tests.multi.test_same_loss import ZERO
from tests.tiny_project import make_project

KILLS, STEPS = 50, 40
LAST = f"checkpoints/step_{STEPS:08d}/weights/model.safetensors"


def train_until_killed(cfg: str, options: list[str], job_id: str, rank: int | None, after_s: float) -> int:
    """A run that goes on from its newest checkpoint; `rank`, or all where it is None, dies `after_s` into training."""
    from lavis_ds.runners import train as train_module

    train_loop = train_module.TrainRunner._train

    def with_kill(self: Any) -> bool:
        if rank in (None, int(os.environ["RANK"])):
            timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        return train_loop(self)

    train_module.TrainRunner._train = with_kill  # type: ignore[method-assign]
    return train(cfg, options, job_id, "auto")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("in_background", [False, True])
def test_fifty_kills_change_nothing(in_background: bool, tmp_path: Path) -> None:
    project = make_project(
        tmp_path, max_steps=STEPS, save_every=1, keep_last=2, valid_splits=["val"], eval_every=3, num_workers=1
    )
    options = [ZERO[2], "run.batch_size_train=2", f"run.save_in_background={in_background}"]
    output = tmp_path / "output"
    run_ranks(train, 2, str(project), options, "alone", timeout_s=200, join_group=False)
    expected = (output / "alone" / LAST).read_bytes()
    rng = random.Random(0)
    kills = finished = step = 0
    steps = []
    while kills < KILLS or step:  # the last run is brought to its end
        rank, after_s = rng.choice([None, 0, 1]), rng.uniform(0.0, 3.0) if kills < KILLS else 1000.0
        arguments = (str(project), [*options, "run.dist_timeout_s=30"], f"killed_{finished}", rank, after_s)
        try:
            run_ranks(train_until_killed, 2, *arguments, timeout_s=120, join_group=False)
        except RanksFailed:
            kills += 1
            done = complete_ones(output / f"killed_{finished}" / "checkpoints")
            newest = int(done[-1].name.removeprefix("step_")) if done else 0
            assert newest >= step, f"kill {kills} lost a complete checkpoint"
            step = newest
            steps.append(step)
        else:
            assert (output / f"killed_{finished}" / LAST).read_bytes() == expected
            finished, step = finished + 1, 0
    print(f"{kills} kills, {finished} runs; after each kill the newest checkpoint was of step {steps}")
