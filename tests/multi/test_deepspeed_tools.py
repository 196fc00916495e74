"""DeepSpeed's own instruments, switched on by its keys, pass the lint and print something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.launch import launch
from tests.tiny_project import make_project

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")


@pytest.mark.parametrize("is_on", [True, False])
def test_timers_communication_log_and_flops_profiler(is_on: bool, tmp_path: Path) -> None:
    project = make_project(tmp_path, max_steps=3, save_every=None)
    settings = [
        "wall_clock_breakdown=true",
        "comms_logger={enabled: true, verbose: true, prof_all: true}",
        "flops_profiler={enabled: true, profile_step: 2}",
    ]
    options = [f"run.deepspeed_config.{setting}" for setting in settings] if is_on else ["run.log_level=error"]
    command = [TRAIN, "--cfg", str(project), "--job-id", "a", "--options", *options]
    done = launch(command, num_ranks=2, timeout_s=180)
    assert done.returncode == 0, done.stderr
    found = {
        "timers": "time (ms) | " in done.stdout and "fwd" in done.stdout,
        "every operation": "comm op: " in done.stdout,
        "sums of operations": "Comm. Op" in done.stdout,
        "flops": "DeepSpeed Flops Profiler" in done.stdout and "fwd flops per GPU" in done.stdout,
    }
    assert found == dict.fromkeys(found, is_on), done.stdout[-3000:]
