"""A training run as a function that ranks call."""

from __future__ import annotations

import os
import signal
from typing import Any


def train(cfg: str, options: list[str], job_id: str, resume: str | None = None, kill_at: int | None = None) -> int:
    """One rank of a training run that, if asked, kills itself without warning after step `kill_at`."""
    from lavis_ds.runners import train as train_module
    from lavis_ds.runners.launch import train as run

    report_step = train_module.TrainRunner._report_step

    def report_then_die(self: Any, *args: Any) -> None:
        report_step(self, *args)
        if self.state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train_module.TrainRunner._report_step = report_then_die  # type: ignore[method-assign]
    return run(cfg, options, job_id=job_id, resume=resume)
