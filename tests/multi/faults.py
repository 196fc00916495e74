"""What goes wrong in `test_faults`. Each rank calls one of these before its run, so that a fault comes later in it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lavis_ds.tasks.base import StepOutput

Fault = Callable[[], object]


def command(cfg: str, job_id: str, options: list[str], resume: str | None, fault: Fault) -> tuple[int, str]:
    """Exit code of the command `train` on this rank, and what it printed to standard error."""
    from lavis_ds import cli

    fault()
    arguments = ["train", "--cfg", cfg, "--job-id", job_id, *(["--resume", resume] if resume else [])]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli._guarded([*arguments, "--options", *options])
    return code, said.getvalue()


def none() -> None:
    """Nothing goes wrong."""


def _rank() -> int:
    return int(os.environ["RANK"])


def _die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _before(owner: Any, name: str, action: Callable[..., object]) -> None:
    """`action` gets the arguments of every call of a function first."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


# ---- killed ----------------------------------------------------------------------------------------------------------


def killed_in_evaluation() -> None:
    """Rank 1, after the first batch of the first evaluation."""
    from lavis_ds.tasks.instruct import InstructTask

    if _rank() == 1:
        evaluate = InstructTask.eval_step
        InstructTask.eval_step = lambda *args: (evaluate(*args), _die())[0]  # type: ignore[assignment, method-assign]


def killed_in_a_shard() -> None:
    """Rank 1, when half of its stretches of the optimizer are written."""
    from lavis_ds.engines import fragments

    def write_half(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"x" * (sum(tensor.nbytes for tensor in tensors.values()) // 2))
        _die()

    if _rank() == 1:
        fragments.save_file = write_half


def killed_before_the_mark() -> None:
    """Rank 0, when the checkpoint has its name and not yet its mark."""
    if _rank() == 0:
        _before(Path, "touch", lambda path: path.name == "COMPLETE" and _die())


def killed_in_a_removal() -> None:
    """Rank 0, when the checkpoint of step 2, which is not kept, is half removed."""

    remove = shutil.rmtree

    def remove_half(path: Path, *_: object, **__: object) -> None:
        if path.name == "step_00000002":
            remove(path / "optimizer")
            _die()

    if _rank() == 0:
        _before(shutil, "rmtree", remove_half)


# ---- disks -----------------------------------------------------------------------------------------------------------


def _at_step(step: int, action: Callable[[Any], object]) -> None:
    """Rank 0 acts after this step, before anything that follows it."""
    from lavis_ds.runners.train import TrainRunner

    if _rank() == 0:
        _before(TrainRunner, "_report_step", lambda self, *_: self.state.step == step and action(self))


def _fill_the_disk(output: Path, free: int) -> None:
    with contextlib.suppress(OSError), (output / "ballast").open("wb", buffering=0) as file:
        while shutil.disk_usage(output).free > free:
            file.write(bytes(4096))


def disk_full_in_a_save() -> None:
    """Somebody else fills the disk when the save of step 6 begins, but for 40 kB, unseen by the check of its room."""
    from lavis_ds.runners import checkpoint_files
    from lavis_ds.runners.checkpoint_writer import CheckpointWriter

    def fill(self: Any, state: Any, *_: object) -> None:
        if state.step == 6:
            _fill_the_disk(self._folder.parent.parent, 40_000)

    checkpoint_files.check_space = lambda *_: None
    if _rank() == 0:
        _before(CheckpointWriter, "begin", fill)


def disk_full_before_a_line() -> None:
    """The disk is full when step 5 is reported."""
    _at_step(5, lambda runner: _fill_the_disk(runner.job.folder.parent, 0))


def read_only_after_step_5() -> None:
    """The file system of `checkpoints/` becomes read-only, as the kernel does it after errors of the disk."""
    _at_step(5, lambda runner: subprocess.run(["mount", "-o", "remount,bind,ro", runner.job.checkpoints], check=True))


def renaming_file_by_file() -> None:
    """Renaming a folder moves one file after the other, slowly, as gateways to object stores do it.

    Meanwhile rank 1 looks what is there, and dies at a checkpoint that is not whole.
    """
    if _rank() == 0:
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if not self.is_dir():
                return original(self, target)
            for path in sorted(path for path in self.rglob("*") if path.is_file()):
                moved = target / path.relative_to(self)
                moved.parent.mkdir(parents=True, exist_ok=True)
                original(path, moved)
                time.sleep(0.05)
            shutil.rmtree(self)
            return target

        Path.rename = rename  # type: ignore[assignment, method-assign]
    else:
        _before_run(lambda folder: threading.Thread(target=_look, args=(folder,), daemon=True).start())


def _before_run(action: Callable[[Path], object]) -> None:
    from lavis_ds.runners.train import TrainRunner

    _before(TrainRunner, "run", lambda self: action(self.job.checkpoints))


def _look(folder: Path) -> None:
    """Every checkpoint that is marked complete must be whole, at any moment."""
    from lavis_ds.errors import CheckpointError
    from lavis_ds.runners import checkpoint_files

    while True:
        for path in checkpoint_files.complete_ones(folder):
            try:
                manifest = checkpoint_files.verify(path)
                assert not checkpoint_files.changed(path, manifest, manifest["files"])
            except (CheckpointError, AssertionError):
                if (path / checkpoint_files.COMPLETE).exists():  # else it is just being removed
                    _die()
        time.sleep(0.01)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def not_finite_on_rank_1(loss_in: int = 2, gradient_in: int = 4) -> None:
    """In one step the loss of rank 1 is NaN; in another its loss is finite and the gradient is NaN."""
    from lavis_ds.tasks.instruct import InstructTask

    train_step, calls = InstructTask.train_step, []

    def poisoned(self: Any, forward: Any, batch: Any) -> StepOutput:
        calls.append(batch)
        output = train_step(self, forward, batch)
        if len(calls) == loss_in:
            return StepOutput(output.loss_sum * float("nan"), output.metrics)
        if len(calls) == gradient_in:
            return StepOutput(output.loss_sum + (output.loss_sum * 0).sqrt(), output.metrics)
        return output

    if _rank() == 1:
        InstructTask.train_step = poisoned  # type: ignore[method-assign]


# ---- saving while an evaluation runs ---------------------------------------------------------------------------------


def writing_takes_longer_than_an_evaluation() -> None:
    """Each rank writes its first three checkpoints when the next step's evaluation is over, and says so."""
    from lavis_ds.engines import fragments
    from lavis_ds.runners import train

    is_over = threading.Event()
    evaluate, steps = train.evaluate, []

    def evaluate_beside(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        steps.append(kwargs["step"])
        is_over.set()
        return result

    def wait(*_: object, **__: object) -> None:
        step = len(steps)
        is_over.clear()
        if step < 4 and is_over.wait(60):
            print(f"checkpoint {step} is written after the evaluation of step {steps[-1]}", file=sys.stderr)

    train.evaluate = evaluate_beside
    _before(fragments, "write", wait)
