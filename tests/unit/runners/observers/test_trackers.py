"""TensorBoard (its events read back) and Weights & Biases (against a recording double of the package)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lavis_ds.errors import ConfigError
from lavis_ds.runners.observers.base import RunInfo
from lavis_ds.runners.observers.wandb import WandbObserver


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    from lavis_ds.runners.observers.tensorboard import TensorboardObserver

    for start, stop in ((0, 6), (4, 8), (3, 3)):  # the last one only evaluates an old checkpoint
        observer = TensorboardObserver()
        observer.on_start(RunInfo(tmp_path, 8, {"run": {"seed": 1}}, start_step=start), None)
        for step in range(start + 1, stop + 1):
            observer.on_step(step, {"train/loss": float(10 * start + step), "data/sample_ids": ["a"]})
        observer.on_evaluate("test", stop, {"accuracy": 0.5}, [])
        observer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        *((step, float(step)) for step in range(1, 5)),
        *((step, 40.0 + step) for step in range(5, 9)),
    ]
    assert sorted(e.step for e in events.Scalars("eval/test/accuracy")) == [3, 8]
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/test/accuracy"}


class FakeWandb:
    """Records what is asked of the package; gives out the id `fresh` where none is asked for."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        return SimpleNamespace(
            id=arguments["id"] or "fresh",
            define_metric=lambda *a, **k: None,
            log=self.logged.append,
            finish=self._finish,
        )

    def _finish(self) -> None:
        self.finished += 1


def test_wandb_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for start in (0, 4):
        observer = WandbObserver()
        observer.on_start(RunInfo(tmp_path, 8, {"run": {"seed": 1}}, start_step=start), None)
        observer.on_step(start + 1, {"train/loss": 0.5, "data/sample_ids": ["a"]})
        observer.on_evaluate("test", start + 1, {"accuracy": 0.5}, [])
        observer.close()
        observer.close()
    assert [(i["id"], i["resume"], i["project"]) for i in fake.inits] == [
        (None, "allow", "lavis-ds"),
        ("fresh", "allow", "lavis-ds"),
    ]
    assert fake.logged[:2] == [{"step": 1, "train/loss": 0.5}, {"step": 1, "eval/test/accuracy": 0.5}]
    assert fake.finished == 2


def test_wandb_missing_gets_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        WandbObserver()
