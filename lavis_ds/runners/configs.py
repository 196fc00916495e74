"""Options of the built-in runners. No torch here."""

from __future__ import annotations

from lavis_ds.config.schema import RunnerConfig


class TrainRunnerConfig(RunnerConfig):
    """The training loop; everything it needs is in `run:`."""

    name: str = "train"
