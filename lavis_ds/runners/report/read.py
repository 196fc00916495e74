"""A run folder, read into one object; what is missing or damaged becomes a sentence, never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from lavis_ds.errors import ConfigError

T = TypeVar("T")
Array = NDArray[np.float64]

METRICS = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "throughput/tokens_per_s",
    "throughput/mfu",
    "time/step_s",
    "time/data_s",
    "memory/peak_bytes",
)
"""What the page reads of `metrics.jsonl`."""


@dataclass(frozen=True)
class Evaluation:
    """One file of `eval/`: the scores of a split after a number of steps, and where its predictions lie."""

    split: str
    step: int
    metrics: dict[str, float]
    predictions: Path


@dataclass
class Run:
    """What the page shows of one run.

    Attributes:
        metrics: name -> (steps, values), both (n,), finite or not as they were written.
        notes: sentences that say what is missing.
    """

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def values(self, name: str) -> Array:
        """All finite values of a metric, (n,), in the order of steps; empty where there are none."""
        values = self.metrics.get(name, (np.empty(0), np.empty(0)))[1]
        return values[np.isfinite(values)]

    @property
    def last_step(self) -> int:
        """The highest step that any file speaks of."""
        steps = [int(steps[-1]) for steps, _ in self.metrics.values()] + [e.step for e in self.evaluations]
        return max(steps, default=0)

    def last_evaluations(self) -> list[Evaluation]:
        """The newest evaluation of each split."""
        return list({e.split: e for e in self.evaluations}.values())


def read_run(folder: Path) -> Run:
    """The run in `folder`.

    Raises:
        ConfigError: the folder does not exist, or holds none of config.yaml, metrics.jsonl and eval/.
    """
    if not any((folder / part).exists() for part in ("config.yaml", "metrics.jsonl", "eval")):
        raise ConfigError(
            "this is no run folder.",
            where=str(folder),
            expected="a folder with config.yaml, metrics.jsonl or eval/",
            hint="Give the folder <run.output_dir>/<job_id>.",
        )
    run = Run(folder, folder.resolve().name)
    _read_config(run)
    run.environment = _read(run, "environment.json", _json_object) or {}
    _read_metrics(run)
    _read_evaluations(run)
    return run


def _read(run: Run, name: str, parse: Callable[[str], T]) -> T | None:
    """The parsed file, or None and a note on the run."""
    path = run.folder / name
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.notes.append(f"{name} is missing.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.notes.append(f"{name} can't be read: {' '.join(str(error).split())[:200]}.")
    return None


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def _read_config(run: Run) -> None:
    run.config_text = _read(run, "config.yaml", str) or ""
    if run.config_text:
        tree = _read(run, "config.yaml", yaml.safe_load)
        run.config = tree if isinstance(tree, dict) else {}


def _read_metrics(run: Run) -> None:
    text = _read(run, "metrics.jsonl", str)
    if text is None:
        return
    columns: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in METRICS}
    unreadable = 0
    for line in text.splitlines():
        try:
            record = _json_object(line)
            step = float(record["step"])
        except (ValueError, KeyError, TypeError):
            unreadable += 1
            continue
        for name, (steps, values) in columns.items():
            if isinstance(record.get(name), int | float):
                steps.append(step)
                values.append(float(record[name]))
    run.metrics = {name: (np.array(s), np.array(v)) for name, (s, v) in columns.items() if s}
    if unreadable:
        run.notes.append(f"metrics.jsonl has {unreadable} unreadable line{'s' * (unreadable > 1)}, left out.")
    if not run.metrics:
        run.notes.append("metrics.jsonl holds no steps yet.")


def _read_evaluations(run: Run) -> None:
    for path in sorted((run.folder / "eval").glob("*_step_*.json")):
        content = _read(run, f"eval/{path.name}", _json_object)
        if content is None:
            continue
        metrics, step = content.get("metrics"), content.get("step")
        if not isinstance(metrics, dict) or not isinstance(step, int):
            run.notes.append(f"eval/{path.name} has no metrics or no step.")
            continue
        numbers = {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        run.evaluations.append(Evaluation(str(content.get("split")), step, numbers, path.with_suffix(".jsonl")))
    run.evaluations.sort(key=lambda e: e.step)
    if not run.evaluations:
        run.notes.append("There are no evaluations yet.")
