"""Environment of each launcher -> ranks, as the launchers' manuals say and as their processes have it."""

from __future__ import annotations

import pytest

from lavis_ds.errors import ConfigError
from lavis_ds.runners.launcher_env import Ranks, adopt, detect, first_host, restarts

Environ = dict[str, str]


def given(text: str) -> Environ:
    return dict(pair.split("=", 1) for pair in text.split())


TORCHRUN = given(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=4000 "
    "GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none"
)
DEEPSPEED = given(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=4000 CROSS_RANK=1 CROSS_SIZE=2"
)
SRUN = given(
    "SLURM_JOB_ID=70001 SLURM_STEP_ID=2 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=8 "
    "SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS_PER_NODE=4 SLURM_STEP_TASKS_PER_NODE=4(x2) "
    "SLURM_JOB_NODELIST=gpu[07-09] SLURM_STEP_NODELIST=gpu[08-09]"
)
BATCH_SCRIPT = given("SLURM_JOB_ID=70001 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gpu[08-09]")
OPEN_MPI = given(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4"
)
MPICH = given("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
MASTER = given("MASTER_ADDR=10.0.0.1 MASTER_PORT=4000")
IN_THE_MIDDLE = Ranks(5, 8, 1, 4, "10.0.0.1", 4000)


def test_a_process_started_by_hand_has_no_ranks() -> None:
    assert detect({}) is None
    assert detect({"WORLD_SIZE": "1"}) is None
    assert detect(given("MASTER_ADDR=10.0.0.1 MASTER_PORT=4000")) is None


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN,
        DEEPSPEED,
        TORCHRUN | given("TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_MAX_RESTARTS=0"),
        TORCHRUN | given("TORCHELASTIC_USE_AGENT_STORE=False TORCHELASTIC_MAX_RESTARTS=3"),
        OPEN_MPI | MASTER,
        MPICH | MASTER,
        SRUN | MASTER,
        # Ranks inside a job of SLURM: the batch script's numbers, or those of the daemons, are not the ranks'.
        TORCHRUN | BATCH_SCRIPT | given("SLURM_NTASKS=2"),
        TORCHRUN
        | SRUN
        | given("SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"),
        OPEN_MPI | MASTER | SRUN | given("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2"),
        # `export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS` in the command that srun starts
        SRUN | MASTER | given("RANK=5 WORLD_SIZE=8"),
    ],
)
def test_the_same_place_by_every_launcher(environ: Environ) -> None:
    assert detect(environ) == IN_THE_MIDDLE


def test_srun_needs_nothing_else() -> None:
    assert detect(SRUN) == Ranks(5, 8, 1, 4, "gpu08", 15000 + 70003 % 15000)
    other_task = SRUN | given("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
    assert detect(other_task) == Ranks(0, 8, 0, 4, "gpu08", 15000 + 70003 % 15000), "all tasks meet at one place"


@pytest.mark.parametrize(
    ("changes", "here"),
    [("SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=5(x1),3", 3), ("SLURM_STEP_TASKS_PER_NODE=", 4)],
)
def test_tasks_on_this_machine(changes: str, here: int) -> None:
    found = detect(SRUN | given(changes))
    assert found is not None
    assert found.local_world_size == here


def test_a_single_task_and_an_interactive_shell_are_alone() -> None:
    alone = detect(SRUN | given("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"))
    assert alone is not None
    assert (alone.world_size, alone.master_addr) == (1, "127.0.0.1")
    assert detect(BATCH_SCRIPT | given("SLURM_NTASKS=1")) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[07-09]", "gpu07"),
        ("gpu[3,7-9].cluster,cpu1", "gpu3.cluster"),
        ("rack[2-3]n[01-04,07],gpu9", "rack2n01"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_one_process_a_pod() -> None:
    second = Ranks(1, 4, 0, 1, "job-0.job", 4000)
    master = given("MASTER_ADDR=job-0.job MASTER_PORT=4000")
    assert detect(given("RANK=1 WORLD_SIZE=4") | master) == second, "PyTorchJob"
    assert detect(given("JOB_COMPLETION_INDEX=1 WORLD_SIZE=4") | master) == second, "an indexed job"
    without_port = detect(given("JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 MASTER_ADDR=job-0.job"))
    assert without_port is not None
    assert without_port.master_port == 29500
    assert detect({"JOB_COMPLETION_INDEX": "1"}) is None, "pods may be runs of their own"


def test_mpirun_on_one_machine_needs_no_address() -> None:
    found = detect(OPEN_MPI | given("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1"))
    assert found == Ranks(1, 4, 1, 4, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (given("RANK=0"), "WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set, since RANK"),
        (given("WORLD_SIZE=4"), "RANK must be set, since WORLD_SIZE is set"),
        (given("WORLD_SIZE=4 LOCAL_RANK=0") | MASTER, "RANK must be set"),
        (given("JOB_COMPLETION_INDEX=0 MASTER_ADDR=a"), "WORLD_SIZE must be set, since JOB_COMPLETION_INDEX"),
        (given("JOB_COMPLETION_INDEX=0 WORLD_SIZE=2"), "MASTER_ADDR must be set"),
        (OPEN_MPI, "MASTER_ADDR must be set, since mpirun started ranks on several machines.*-x MASTER_ADDR"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID, MPI_LOCALNRANKS must be set, since PMI_RANK"),
        ({k: v for k, v in SRUN.items() if "NODELIST" not in k}, "SLURM_JOB_NODELIST must be set.*Or set MASTER_ADDR"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID must be set, since srun"),
        (BATCH_SCRIPT | given("SLURM_NTASKS=8"), "was not started by srun.*SLURM_NTASKS=8.*srun python"),
        (SRUN | MASTER | given("RANK=0 WORLD_SIZE=1"), "contradict SLURM.*RANK=0, WORLD_SIZE=1; SLURM_PROCID=5"),
        (SRUN | TORCHRUN | given("GROUP_WORLD_SIZE=1"), "do not know of each other.*SLURM_STEP_NUM_TASKS=8"),
        (SRUN | DEEPSPEED | given("CROSS_SIZE=1"), "do not know of each other"),
        (TORCHRUN | given("TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_MAX_RESTARTS=3"),
         "--max-restarts 3 and one store.*export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        (TORCHRUN | given("RANK=8"), "a rank must be less.*RANK=8, WORLD_SIZE=8"),
        (TORCHRUN | given("LOCAL_RANK=4"), "a rank must be less.*LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | given("WORLD_SIZE=eight"), "WORLD_SIZE must be a whole number.*'eight'"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_one_clear_error(environ: Environ, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        detect(environ)
    assert str(caught.value).startswith("environment: ")


def test_adopt_writes_what_torch_and_deepspeed_read() -> None:
    environ = dict(SRUN)
    adopt(environ)
    added = {name: value for name, value in environ.items() if name not in SRUN}
    assert added == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu08", "MASTER_PORT": str(15000 + 70003 % 15000),
    }  # fmt: skip
    adopt(environ)  # a second time finds its own numbers, which do not contradict
    untouched = {"HOME": "/root"}
    adopt(untouched)
    assert untouched == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("environ", "count"),
    [({}, 0), ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0), ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
     ({"SLURM_RESTART_COUNT": "1"}, 1)],
)  # fmt: skip
def test_restarts(environ: Environ, count: int) -> None:
    assert restarts(environ) == count
