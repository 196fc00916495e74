"""Launchers that do more than start ranks once: torchrun that starts dead ones again, and tasks of srun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.multi.launch import CPU_ONLY, free_port, launch
from tests.tiny_project import make_project, metrics

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")

DIES_ONCE = """
import os
import pathlib
import signal
from lavis_ds import registry
from lavis_ds.tasks.instruct import InstructTask


@registry.register_task("dies_once")
class DiesOnceTask(InstructTask):
    calls = 0

    def train_step(self, forward, batch):
        self.calls += 1
        mark = pathlib.Path(os.environ["DIED"])
        if self.calls == 6 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(forward, batch)
"""


def test_torchrun_that_starts_a_dead_rank_again_resumes_by_itself(tmp_path: Path) -> None:
    project = make_project(tmp_path, max_steps=7, save_every=2)
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    options = ["--options", f"plugins=[{tmp_path / 'dies_once.py'}]", "run.task=dies_once"]
    elastic = ["--max-restarts", "2", "--monitor-interval", "0.2"]

    def run(name: str, died: str) -> None:
        command = [TRAIN, "--cfg", str(project), "--job-id", name, *options]
        env = {"DIED": str(tmp_path / died)}
        done = launch(command, num_ranks=2, launcher_args=elastic, timeout_s=240, env=env)
        assert done.returncode == 0, done.stderr

    (tmp_path / "before").touch()
    run("whole", "before")
    run("broken", "now")
    assert (tmp_path / "now").exists()
    whole, broken = metrics(tmp_path / "output" / "whole"), metrics(tmp_path / "output" / "broken")
    assert [line["step"] for line in broken] == list(range(1, 8))
    assert [line["train/loss"] for line in broken] == [line["train/loss"] for line in whole]
    assert [line["data/sample_ids"] for line in broken] == [line["data/sample_ids"] for line in whole]


def test_tasks_of_srun_train_together(tmp_path: Path) -> None:
    """Plain `python` with SLURM's variables, each task with its own, and none of torch's."""
    project = make_project(tmp_path, max_steps=2)
    job = {"SLURM_JOB_ID": str(free_port() - 15000), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
           "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
           "SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip
    command = [sys.executable, TRAIN, "--cfg", str(project), "--job-id", "a"]
    tasks = []
    try:
        for number in range(2):
            own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            log = (tmp_path / f"{number}.log").open("w")
            env = {**os.environ, **CPU_ONLY, **job, **own}
            tasks.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env))
        codes = [task.wait(150) for task in tasks]
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                task.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"{number}.log").read_text()[-3000:] for number in range(2))
    assert [line["step"] for line in metrics(tmp_path / "output" / "a")] == [1, 2]
