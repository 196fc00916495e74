"""Checkpoints made of small files, and a run of the tiny project in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds import distributed
from lavis_ds.cli import main
from lavis_ds.config.load import load
from lavis_ds.runners import checkpoint_files, checksums, job, preflight
from lavis_ds.runners.train import TrainRunner
from tests.tiny_project import make_project

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def alone() -> Iterator[None]:
    """No launcher around; afterwards neither a process group nor its environment is left."""
    before = {name: os.environ.pop(name, None) for name in LAUNCHER}
    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "cpu_count", lambda: 1)  # one thread: more would wait for each other on a busy machine
            yield
    finally:
        distributed.shutdown()
        torch.set_num_threads(threads)
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@pytest.fixture
def process() -> Iterator[None]:
    """For tests that join a process group."""
    with alone():
        yield


@dataclass(frozen=True)
class TinyRun:
    """A finished run of 6 steps with checkpoints of steps 3 and 6, evaluated on `val` at step 4 and at the end."""

    cfg: Path
    folder: Path
    code: int


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder = tmp_path_factory.mktemp("tiny")
    settings: dict[str, Any] = {"engine": "torch", "max_steps": 6, "save_every": 3, "eval_every": 4}
    cfg = make_project(folder, **settings, valid_splits=["val"], test_splits=["val"])
    with alone():
        code = main(["train", "--cfg", str(cfg), "--job-id", "whole"])
    return TinyRun(cfg, folder / "output" / "whole", code)


@pytest.fixture
def make_runner(process: None, tiny_run: TinyRun, tmp_path: Path) -> Callable[..., TrainRunner]:
    """The training loop of the tiny project, built and not yet started; arguments are options."""

    def make(*options: str, resume: str | None = None) -> TrainRunner:
        changed = [f"run.output_dir={tmp_path / 'output'}", "run.valid_splits=[]", "run.test_splits=[]", *options]
        config = load(tiny_run.cfg, changed).config
        chosen = job.resolve(config, job_id="a", resume=resume)
        job.make_folder(chosen)
        distributed.initialize(30)
        return TrainRunner(config, chosen, preflight.check(config, world_size=1))

    return make


@pytest.fixture
def make_checkpoint() -> Callable[..., Path]:
    """Write a complete checkpoint of a few bytes."""

    def make(folder: Path, step: int, keep_last: int = 9, **keep: int) -> Path:
        final = checkpoint_files.step_folder(folder, step)
        partial = checkpoint_files.begin(final)
        (partial / "optimizer" / "shard.pt").write_bytes(b"x" * 100)
        (partial / "train_state.json").write_text("{}")
        files = checksums.contents(partial, checkpoint_files.written(partial))
        checkpoint_files.finish(
            partial, final, {"engine": "torch"}, {}, checkpoint_files.Keep(keep_last, **keep), files
        )
        return final

    return make
