"""Weights & Biases. The package is imported only here, and only when it is asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lavis_ds.errors import ConfigError
from lavis_ds.runners.observers.base import Metrics, Observer, RunInfo

ID_FILE_NAME = "wandb_run_id.txt"


class WandbObserver(Observer):
    """Every number of every step and evaluation; a resumed run goes on under the id stored in its run folder.

    The project is `WANDB_PROJECT`, or `lavis-ds` where that is not set; the other settings are wandb's own variables.

    Raises:
        ConfigError: the package `wandb` can't be imported.
    """

    _run: Any = None

    def __init__(self, log_every: int = 1) -> None:
        super().__init__(log_every)
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"the package 'wandb' can't be imported ({error}).",
                where="run.observers",
                hint="Install it with `pip install wandb`, or take 'wandb' out of the list.",
            ) from error

    def on_start(self, run: RunInfo, state: object) -> None:
        id_file = run.folder / ID_FILE_NAME
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run = self._wandb.init(
            id=run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "lavis-ds"),
            name=run.folder.name,
            dir=str(run.folder),
            config=run.config,
        )
        id_file.write_text(f"{self._run.id}\n")
        # Our own step is the x axis: wandb's internal one only grows, so it would drop the steps a resume does again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **{k: v for k, v in metrics.items() if not isinstance(v, list)}})

    def on_evaluate(
        self, split: str, step: int, metrics: Mapping[str, float], predictions: Sequence[Mapping[str, Any]]
    ) -> None:
        self._run.log({"step": step, **{f"eval/{split}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
