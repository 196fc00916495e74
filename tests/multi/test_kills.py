"""Killed fifty times at any moment, one rank or all of them, runs end with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.distributed import is_loss_of_a_rank
from lavis_ds.runners import checkpoint_files
from tests.multi.launch import RanksFailed, run_ranks
from tests.multi.runs import train
from tests.multi.test_same_loss import ZERO
from tests.tiny_project import make_project

KILLS, STEPS = 50, 40
LAST = f"checkpoints/step_{STEPS:08d}/weights/model.safetensors"
PLACES, PACE = "places.txt", "pace.txt"
WINDOW = 12
"""Steps, at the pace of the undisturbed run, in which a kill comes."""


def train_until_killed(cfg: str, options: list[str], job_id: str, rank: int | None, after_s: float | None) -> int:
    """A run that goes on from its newest checkpoint; `rank`, or all where it is None, dies `after_s` into training."""
    from lavis_ds.runners import train as train_module

    train_loop = train_module.TrainRunner._train

    def with_kill(self: Any) -> bool:
        if after_s is not None and rank in (None, int(os.environ["RANK"])):
            timer = threading.Timer(after_s, die, (self,))
            timer.daemon = True
            timer.start()
        started = time.monotonic()
        stopped = train_loop(self)
        if os.environ["RANK"] == "0":
            (self.job.folder / PACE).write_text(str((time.monotonic() - started) / STEPS))
        return stopped

    def die(runner: Any) -> None:
        doing = re.sub(r"\d+ of \d+", "", runner.progress.place.doing).strip()
        behind = ", writing behind" if runner.writer.is_busy() else ""
        with (runner.job.folder.parent / PLACES).open("a") as file:
            file.write(f"{doing}{behind}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    train_module.TrainRunner._train = with_kill  # type: ignore[method-assign]
    return train(cfg, options, job_id, "auto")


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("in_background", [False, True])
def test_fifty_kills_change_nothing(in_background: bool, tmp_path: Path) -> None:
    project = make_project(
        tmp_path, max_steps=STEPS, save_every=1, keep_last=2, valid_splits=["val"], eval_every=3, num_workers=1
    )
    options = [ZERO[2], "run.batch_size_train=2", f"run.save_in_background={in_background}"]
    output = tmp_path / "output"
    run_ranks(train_until_killed, 2, str(project), options, "alone", None, None, timeout_s=600, join_group=False)
    expected = (output / "alone" / LAST).read_bytes()
    window_s = WINDOW * float((output / "alone" / PACE).read_text())
    rng = random.Random(0)
    kills = finished = step = 0
    steps = []
    while kills < KILLS or step or not finished:  # the last run is brought to its end
        rank, after_s = rng.choice([None, 0, 1]), rng.uniform(0.0, window_s) if kills < KILLS else None
        arguments = (str(project), [*options, "run.dist_timeout_s=60"], f"killed_{finished}", rank, after_s)
        try:
            run_ranks(train_until_killed, 2, *arguments, timeout_s=600, join_group=False)
        except RanksFailed as failure:
            assert after_s is not None, "nobody was killed"
            assert_of_a_kill(str(failure))
            kills += 1
            newest = newest_whole(output / f"killed_{finished}" / "checkpoints")
            assert newest >= step, f"kill {kills} lost a complete checkpoint"
            step = newest
            steps.append(step)
        else:
            assert (output / f"killed_{finished}" / LAST).read_bytes() == expected
            finished, step = finished + 1, 0
    places = Counter((output / PLACES).read_text().splitlines())
    print(f"{kills} kills, {finished} runs; after each kill the newest checkpoint was of step {steps}")
    print(f"what killed ranks were doing: {places.most_common()}")


def assert_of_a_kill(text: str) -> None:
    """One rank was killed at least, and no other failed for a reason of its own."""
    assert "died with exit code -9" in text, text
    for said in re.findall(r"rank \d raised\n(.*?)(?=\n\nrank \d |\Z)", text, re.DOTALL):
        last_lines = "\n".join(said.strip().splitlines()[-5:])
        assert is_loss_of_a_rank(RuntimeError(last_lines)), text


def newest_whole(folder: Path) -> int:
    """Step of the newest complete checkpoint, whose every byte is as written; 0 where there is none."""
    done = checkpoint_files.complete_ones(folder)
    if not done:
        return 0
    manifest = checkpoint_files.verify(done[-1])
    assert checkpoint_files.changed(done[-1], manifest, manifest["files"]) == []
    return checkpoint_files.step_of(done[-1])
