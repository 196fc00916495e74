"""Which rank this process is, by the variables of whatever started it. Pure: a mapping goes in, nothing else is read.

Understood are, the first that is there: RANK, WORLD_SIZE, ... as torchrun and deepspeed set them for every process and
PyTorchJob for every pod; Open MPI's and MPICH's variables; SLURM's for tasks of `srun`; and the index of a Kubernetes
indexed job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from lavis_ds.errors import ConfigError

_DEFAULT_PORT = 29500
_PORTS = range(15000, 30000)  # below those that Linux gives away by itself
_WHERE = "environment"


@dataclass(frozen=True)
class Ranks:
    """The place of one process among all of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """What torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def adopt(environ: MutableMapping[str, str]) -> None:
    """Write RANK, WORLD_SIZE, LOCAL_RANK, ... into `environ`, where a launcher says them in its own words.

    Raises:
        ConfigError: as `detect`.
    """
    found = detect(environ)
    if found is not None:
        environ.update(found.variables())


def detect(environ: Mapping[str, str]) -> Ranks | None:
    """This process's ranks, or None where nothing has started it but a shell.

    Raises:
        ConfigError: a variable is missing or impossible, or two launchers contradict each other.
    """
    for said in (_from_ranks, _from_mpi, _from_slurm, _from_indexed_job):
        found = said(environ)
        if found is not None:
            return _possible(found)
    return None


def restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun or SLURM has started this very command again."""
    return max(_number(environ, name, 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


# ---- one launcher each -----------------------------------------------------------------------------------------------


def _from_ranks(environ: Mapping[str, str]) -> Ranks | None:
    """From torchrun or deepspeed, one process a GPU; or from PyTorchJob, one process a pod."""
    if "RANK" not in environ and not ("LOCAL_RANK" in environ and "WORLD_SIZE" in environ):
        return None
    _require(environ, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", because="RANK or LOCAL_RANK is set")
    _refuse_shared_store(environ)
    world_size, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    _agree_with_srun(environ, rank, world_size)
    if "LOCAL_RANK" in environ:
        local_size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(name)), "WORLD_SIZE")
        local = _number(environ, "LOCAL_RANK"), _number(environ, local_size)
    elif _is_task_of_srun(environ):
        local = _number(environ, "SLURM_LOCALID"), _slurm_tasks_here(environ, world_size)
    else:
        local = 0, 1
    return Ranks(rank, world_size, *local, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))


def _from_mpi(environ: Mapping[str, str]) -> Ranks | None:
    """From mpirun: of Open MPI, or of MPICH and Intel MPI."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        prefix = "OMPI_COMM_WORLD_"
        names = [prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    elif "PMI_RANK" in environ and not _is_task_of_srun(environ):  # srun sets PMI_RANK too, with its own numbers beside
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        return None
    _require(environ, *names, because=f"{names[0]} is set")
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    if size > local_size:
        hint = "Pass it on: mpirun -x MASTER_ADDR=HOST (Open MPI), mpirun -genv MASTER_ADDR HOST (MPICH)."
        _require(environ, "MASTER_ADDR", because="mpirun started ranks on several machines", hint=hint)
    return Ranks(rank, size, local_rank, local_size, *_master(environ, "127.0.0.1", _DEFAULT_PORT))


def _from_slurm(environ: Mapping[str, str]) -> Ranks | None:
    """From srun. The script of a batch job has SLURM_PROCID as well, and is no task of srun."""
    if not _is_task_of_srun(environ):
        _refuse_forgotten_srun(environ)
        return None
    _require(environ, "SLURM_PROCID", "SLURM_LOCALID", because="srun started this process")
    size = _slurm_tasks(environ)
    if size > 1 and "MASTER_ADDR" not in environ:
        _require(environ, "SLURM_JOB_NODELIST", because="srun started several tasks", hint="Or set MASTER_ADDR.")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = _number(environ, "SLURM_JOB_ID", 0) + _number(environ, "SLURM_STEP_ID", 0)
    port = _PORTS[job % len(_PORTS)]  # jobs and steps that share a machine don't meet
    master = _master(environ, first_host(hosts) if size > 1 else "127.0.0.1", port)
    local_rank, here = _number(environ, "SLURM_LOCALID"), _slurm_tasks_here(environ, size)
    return Ranks(_number(environ, "SLURM_PROCID"), size, local_rank, here, *master)


def _from_indexed_job(environ: Mapping[str, str]) -> Ranks | None:
    """From a Kubernetes job with `completionMode: Indexed`, one process a pod; pods may also be runs of their own."""
    if "WORLD_SIZE" not in environ:
        if "JOB_COMPLETION_INDEX" in environ and "MASTER_ADDR" in environ:
            _require(environ, "WORLD_SIZE", because="JOB_COMPLETION_INDEX and MASTER_ADDR are set")
        return None
    because = "WORLD_SIZE is set"
    if "JOB_COMPLETION_INDEX" not in environ:
        if _number(environ, "WORLD_SIZE") == 1:
            return None
        _require(environ, "RANK", because=because)
    _require(environ, "MASTER_ADDR", because=because)
    rank, size = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, "WORLD_SIZE")
    return Ranks(rank, size, 0, 1, *_master(environ, "", _DEFAULT_PORT))


def _refuse_shared_store(environ: Mapping[str, str]) -> None:
    """Raises:
    ConfigError: torchrun may start the ranks of several machines again, but they would never meet.
    """
    several = _number(environ, "GROUP_WORLD_SIZE", 1) > 1
    shares = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if several and shares and _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0):
        raise ConfigError(
            "torchrun may start the ranks of several machines again, which then would wait for each other for ever.",
            where=_WHERE,
            given=f"--max-restarts {environ['TORCHELASTIC_MAX_RESTARTS']} and one store for all attempts",
            hint="Run `export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on every machine before torchrun, and use "
            "--rdzv-backend c10d.",
        )


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `rack[2-3]n[01-04,07],gpu9` gives `rack2n01`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    """Tasks of this step, which may be fewer than those of the job, SLURM_NTASKS."""
    return _number(environ, "SLURM_STEP_NUM_TASKS")


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this machine, from `4(x2),3` and the machine's number, where SLURM says them."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    return min(_number(environ, "SLURM_NTASKS_PER_NODE", world_size), world_size)


def _refuse_forgotten_srun(environ: Mapping[str, str]) -> None:
    """Raises:
    ConfigError: a batch job asked for several tasks, and its script starts this process without srun.
    """
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_NTASKS", 1) > 1:
        raise ConfigError(
            "the SLURM job has several tasks, but this process was not started by srun, so it would train alone.",
            where=_WHERE,
            given=f"SLURM_NTASKS={environ['SLURM_NTASKS']} without SLURM_STEP_NUM_TASKS",
            hint="Write `srun python scripts/train.py ...` (`srun -n 1` for a single process), or use torchrun.",
        )


def _agree_with_srun(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """Raises:
    ConfigError: RANK and WORLD_SIZE are not those of the srun step that this process, or its launcher, is a task of.
    """
    if not _is_task_of_srun(environ) or _slurm_tasks(environ) == 1 or "OMPI_COMM_WORLD_RANK" in environ:
        return
    tasks = _slurm_tasks(environ)
    launchers = environ.get("GROUP_WORLD_SIZE") or environ.get("CROSS_SIZE")  # as torchrun or deepspeed counts machines
    if launchers == "1":
        raise ConfigError(
            "srun started several launchers that do not know of each other, so each would train a run of its own.",
            where=_WHERE,
            given=f"SLURM_STEP_NUM_TASKS={tasks}, and a launcher of one machine in each",
            hint="Give torchrun --nnodes and --rdzv-endpoint with one task a node, or start python itself by srun.",
        )
    if launchers is None and (rank, world_size) != (_number(environ, "SLURM_PROCID"), tasks):
        raise ConfigError(
            "RANK and WORLD_SIZE contradict SLURM, which started this process.",
            where=_WHERE,
            given=f"RANK={rank}, WORLD_SIZE={world_size}; "
            f"SLURM_PROCID={environ['SLURM_PROCID']}, SLURM_STEP_NUM_TASKS={tasks}",
            hint="Unset RANK and WORLD_SIZE (and LOCAL_RANK); srun's own numbers are used then.",
        )


# ---- values ----------------------------------------------------------------------------------------------------------


def _master(environ: Mapping[str, str], address: str, port: int) -> tuple[str, int]:
    return environ.get("MASTER_ADDR") or address, _number(environ, "MASTER_PORT", port)


def _require(environ: Mapping[str, str], *names: str, because: str, hint: str | None = None) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} must be set, since {because}.",
            where=_WHERE,
            hint=hint or "Unset what is left over from another launcher, or start through torchrun, deepspeed or srun.",
        )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number.", where=_WHERE, given=repr(text))
    return int(text)


def _possible(ranks: Ranks) -> Ranks:
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise ConfigError(
            "a rank must be less than the number of ranks.",
            where=_WHERE,
            given=f"RANK={ranks.rank}, WORLD_SIZE={ranks.world_size}, "
            f"LOCAL_RANK={ranks.local_rank}, LOCAL_WORLD_SIZE={ranks.local_world_size}",
        )
    return ranks
