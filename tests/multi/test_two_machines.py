"""Runs over two machines give the losses of one; where one dies and comes back, it ends as if nothing had happened."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multi import machines
from tests.multi.launch import run_ranks
from tests.multi.runs import train
from tests.tiny_project import make_project, metrics

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")
STEPS, DIES_AT = 16, 6
TIMEOUT_S = 240

# Else the rendezvous of torch 2.14 never tells an agent that joins later where rank 0 is: docs/how-to/spot-machines.md.
REPLACEABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Steps take long enough that a machine can be switched off between two.
SLOW = """
import time
from lavis_ds import registry
from lavis_ds.tasks.instruct import InstructTask


@registry.register_task("slow")
class SlowTask(InstructTask):
    def train_step(self, forward, batch):
        time.sleep(0.5)
        return super().train_step(forward, batch)
"""

NOT_PERMITTED = machines.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NOT_PERMITTED is not None, reason=str(NOT_PERMITTED))]


def test_deepspeed_with_a_hostfile(tmp_path: Path) -> None:
    """The command is started on each machine (`--no_ssh`), as pdsh does it where there is ssh."""
    project = make_project(tmp_path, max_steps=3, save_every=None)
    run_ranks(train, 2, str(project), [], "whole", timeout_s=120, join_group=False)
    with machines.two_machines() as (first, second):
        (tmp_path / "hosts").write_text(f"{first.address} slots=1\n{second.address} slots=1\n")
        launcher = ["-m", "deepspeed.launcher.runner", "--hostfile", str(tmp_path / "hosts"), "--no_ssh"]
        launcher += ["--master_addr", first.address, "--master_port", "29401"]
        script = [TRAIN, "--cfg", str(project), "--job-id", "two"]
        logs = [tmp_path / f"{rank}.log" for rank in range(2)]
        started = [
            machine.start([*launcher, "--node_rank", str(rank), *script], logs[rank], {})
            for rank, machine in enumerate((first, second))
        ]
        codes = [process.wait(120) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    output = tmp_path / "output"
    assert _learned(metrics(output / "two")) == _learned(metrics(output / "whole"))


def test_a_machine_that_dies_and_comes_back_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    project = make_project(tmp_path, max_steps=STEPS, save_every=4)
    (tmp_path / "slow.py").write_text(SLOW)
    whole, broken = tmp_path / "output" / "whole", tmp_path / "output" / "broken"
    run_ranks(train, 2, str(project), [], "whole", timeout_s=120, join_group=False)

    with machines.two_machines() as (first, second):
        rendezvous = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-id", "job", "--rdzv-endpoint", f"{first.address}:29400"]
        options = ["--options", f"plugins=[{tmp_path / 'slow.py'}]", "run.task=slow"]
        script = [TRAIN, "--cfg", str(project), "--job-id", "broken", "--resume", "auto", *options]

        def start(machine: machines.Machine) -> subprocess.Popen[bytes]:
            # By themselves, torchrun's agents find out who is the host by its name, which the two share here.
            own = ["--local-addr", machine.address, "--rdzv-conf", f"is_host={int(machine is first)}"]
            launcher = ["-m", "torch.distributed.run", *rendezvous, *own]
            return machine.start([*launcher, *script], tmp_path / f"{machine.name}.log", REPLACEABLE)

        started = [start(first), start(second)]
        try:
            _wait_for(lambda: (broken / "metrics.jsonl").is_file() and len(metrics(broken)) >= DIES_AT)
            second.switch_off()
            assert started[1].wait(30) != 0
            again = start(second)
            assert started[0].wait(TIMEOUT_S) == 0
            assert again.wait(30) == 0
        except BaseException:
            for machine in (first, second):
                print((tmp_path / f"{machine.name}.log").read_text()[-6000:])
            raise

    assert len(metrics(broken)) == STEPS
    assert _learned(metrics(broken)) == _learned(metrics(whole))


def _learned(lines: list[dict[str, Any]]) -> list[tuple[int, list[str], float]]:
    return [(line["step"], line["data/sample_ids"], line["train/loss"]) for line in lines]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
