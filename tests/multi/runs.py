"""Training runs as functions that ranks call."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def train(
    cfg: str,
    options: list[str],
    job_id: str,
    resume: str | None = None,
    kill_at: int | None = None,
    kill_rank: int | None = None,
) -> int:
    """One rank of a training run that, if asked, kills itself without warning after step `kill_at`.

    All ranks do, or `kill_rank` alone.
    """
    from lavis_ds.runners import train as train_module
    from lavis_ds.runners.launch import train as run

    report_step = train_module.TrainRunner._report_step

    def report_then_die(self: Any, *args: Any) -> None:
        report_step(self, *args)
        if self.state.step == kill_at and kill_rank in (None, int(os.environ["RANK"])):
            os.kill(os.getpid(), signal.SIGKILL)

    train_module.TrainRunner._report_step = report_then_die  # type: ignore[method-assign]
    return run(cfg, options, job_id=job_id, resume=resume)


@dataclass(frozen=True)
class Job:
    """A run of `train_all`."""

    cfg: str
    job_id: str
    options: tuple[str, ...] = ()
    resume: str | None = None


def train_all(jobs: Sequence[Job]) -> list[int]:
    """Exit codes of several runs in one process, which loads the libraries once and keeps its process group.

    Float32 is float32 in convolutions, too: by itself cuDNN rounds to TF32.
    """
    import torch

    from lavis_ds import distributed
    from lavis_ds.runners.launch import train as run

    torch.backends.cudnn.allow_tf32 = False
    distributed.shutdown = lambda: None  # type: ignore[assignment]
    codes = []
    for job in jobs:
        print(f"---- {job.job_id}", flush=True)
        codes.append(run(job.cfg, list(job.options), job_id=job.job_id, resume=job.resume))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return codes
