"""The batch script, with a SLURM whose commands write down how they were called."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "slurm"

# As SLURM: srun doesn't hear of the signal; scancel reaches the step, which leaves as it was told to.
SRUN = """#!/bin/bash
echo "srun $@" >> "$CALLS"
trap 'sleep 0.5; exit $CODE' USR1
touch "$CALLS.started"
if [ "$WAITS" = no ]; then exit "$CODE"; fi
echo $$ > "$CALLS.step"
for _ in $(seq 300); do sleep 0.1; done
exit 9
"""
SCANCEL = """#!/bin/bash
echo "scancel $@" >> "$CALLS"
kill -USR1 "$(cat "$CALLS.step")"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $@" >> "$CALLS"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "CALLS": str(tmp_path / "calls"), "SLURM_JOB_ID": "41"}


def run(slurm: dict[str, str], code: int, signals: list[signal.Signals]) -> tuple[int, list[str]]:
    """Exit code of the script, and what it called after srun."""
    calls = Path(slurm["CALLS"])
    environ = {**slurm, "CODE": str(code), "WAITS": "yes" if signals else "no"}
    command = ["bash", str(SCRIPTS / "train.sbatch"), "--cfg", "a.yaml", "--job-id", "a b"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while signals and not Path(f"{calls}.step").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.2)
        returncode = process.wait(20)
    finally:
        process.kill()
    first, *rest = calls.read_text().splitlines()
    assert first == "srun --kill-on-bad-exit=1 python scripts/train.py --cfg a.yaml --job-id a b --resume auto"
    return returncode, rest


@pytest.mark.parametrize("code", [75, 137, 143])
def test_asked_to_stop_it_tells_the_ranks_and_goes_back_into_the_queue(code: int, slurm: dict[str, str]) -> None:
    calls = ["scancel --signal=USR1 41", "scontrol requeue 41"]
    assert run(slurm, code, [signal.SIGUSR1]) == (code, calls)


def test_asked_twice(slurm: dict[str, str]) -> None:
    code, calls = run(slurm, 75, [signal.SIGUSR1, signal.SIGTERM])
    assert code == 75
    assert calls == ["scancel --signal=USR1 41", "scancel --signal=USR1 41", "scontrol requeue 41"]


def test_asked_in_its_last_step(slurm: dict[str, str]) -> None:
    assert run(slurm, 0, [signal.SIGUSR1]) == (0, ["scancel --signal=USR1 41"]), "the run was done"


@pytest.mark.parametrize(("code", "calls"), [(0, []), (1, []), (137, []), (75, ["scontrol requeue 41"])])
def test_without_being_asked(code: int, calls: list[str], slurm: dict[str, str]) -> None:
    assert run(slurm, code, []) == (code, calls)


@pytest.mark.parametrize("name", ["train.sbatch", "train_torchrun.sbatch"])
def test_scripts_are_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    assert "#SBATCH --requeue" in (SCRIPTS / name).read_text()
