"""What watches a run: console, metrics.jsonl, TensorBoard, Weights & Biases, the report.

Names are declared by import path, so a wrong one is refused without importing torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lavis_ds.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lavis_ds.runners.observers.base import Observer


@dataclass(frozen=True)
class Entry:
    """Where an observer's class is found (`module:Class`), and the package it needs besides lavis_ds's own."""

    target: str
    package: str | None = None


OBSERVERS: dict[str, Entry] = {
    "console": Entry("lavis_ds.runners.observers.console:ConsoleObserver"),
    "jsonl": Entry("lavis_ds.runners.observers.jsonl:JsonlObserver"),
    "tensorboard": Entry("lavis_ds.runners.observers.tensorboard:TensorboardObserver"),
    "wandb": Entry("lavis_ds.runners.observers.wandb:WandbObserver", package="wandb"),
    "report": Entry("lavis_ds.runners.observers.report:ReportObserver"),
}
"""Every observer, by the name used in `run.observers`."""


def check(names: Sequence[str]) -> None:
    """Returns when every name can be built; imports none of them, so every rank can call it before anything expensive.

    Raises:
        ConfigError: a name is unknown, or the package that it needs is not installed.
    """
    for name in names:
        if name not in OBSERVERS:
            raise ConfigError(
                f"there is no observer named {name!r}.",
                where="run.observers",
                expected=f"some of {', '.join(OBSERVERS)}",
                hint=did_you_mean(name, OBSERVERS),
            )
        package = OBSERVERS[name].package
        if package and not _is_installed(package):
            raise ConfigError(
                f"the observer {name!r} needs the package {package!r}, which is not installed.",
                where="run.observers",
                hint=f"Install it with `pip install {package}`, or take {name!r} out of the list.",
            )


def build(names: Sequence[str], log_every: int) -> list[Observer]:
    """The observers with these names, in the order given (a name given twice counts once).

    Args:
        names: some of `OBSERVERS`.
        log_every: optimizer steps between console lines.

    Raises:
        ConfigError: see `check`.
    """
    check(names)
    observers: list[Observer] = []
    for name in dict.fromkeys(names):
        module, _, attribute = OBSERVERS[name].target.partition(":")
        observers.append(getattr(importlib.import_module(module), attribute)(log_every))
    return observers


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A plain folder of that name in the working directory (wandb makes one) also gives a spec, but without an origin.
    return spec is not None and spec.origin is not None
