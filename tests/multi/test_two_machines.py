"""A run over two machines, of which one dies and comes back: it ends as if nothing had happened."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multi import machines
from tests.multi.launch import run_ranks
from tests.multi.runs import train
from tests.tiny_project import make_project, metrics

TRAIN = str(Path(__file__).parents[2] / "scripts" / "train.py")
STEPS, DIES_AT = 16, 6
TIMEOUT_S = 240

# By default the rendezvous of torch 2.14 never tells an agent that joins later where rank 0 is (docs/how-to/spot-machines.md).
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


@pytest.mark.slow
@pytest.mark.skipif(NOT_PERMITTED is not None, reason=str(NOT_PERMITTED))
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

    assert [line["step"] for line in metrics(broken)] == list(range(1, STEPS + 1))
    for line, expected in zip(metrics(broken), metrics(whole), strict=True):
        assert line["data/sample_ids"] == expected["data/sample_ids"]
        assert line["train/loss"] == expected["train/loss"]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
