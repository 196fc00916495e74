"""Which run folder this is, and what it resumes from. Needs no torch, so that a mistake costs no start-up time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import CheckpointError, ConfigError, LavisError
from lavis_ds.runners import checkpoint_files


@dataclass(frozen=True)
class Job:
    """One run's place on disk.

    Attributes:
        folder: `<run.output_dir>/<job_id>`.
        resume_from: checkpoint folder to continue from, or None.
        notices: lines to tell the user.
        is_free: whether an older checkpoint will do, since the user named none.
    """

    folder: Path
    resume_from: Path | None = None
    notices: tuple[str, ...] = ()
    is_free: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def without_damaged(self, damaged: Sequence[str]) -> Job:
        """The job as it goes on without its checkpoint, of which these files have changed.

        Raises:
            CheckpointError: the user named that checkpoint.
        """
        path = self.resume_from
        assert path is not None
        what = f"{path / damaged[0]}: this file no longer holds what was written (its checksum differs)"
        older = [other for other in checkpoint_files.complete_ones(self.checkpoints) if other.name < path.name]
        if not self.is_free:
            raise CheckpointError(
                "a file no longer holds what was written: its checksum differs.",
                where=str(path / damaged[0]),
                given=f"{len(damaged)} such files" if damaged[1:] else None,
                hint=f"Resume from {older[-1].name}." if older else "Copy it again, if you have another copy.",
            )
        found, passed_over = checkpoint_files.find(self.checkpoints, before=path)
        outcome = f"continuing from {found}." if found else "no other checkpoint is whole; starting anew."
        lines = (f"passed over: {what}.", *(f"passed over: {line}" for line in passed_over), outcome)
        return replace(self, resume_from=found, notices=(*self.notices, *(f"resume auto: {line}" for line in lines)))

    def with_notices(self, lines: Sequence[str]) -> Job:
        return replace(self, notices=(*lines, *self.notices))


def resolve(config: RootConfig, *, job_id: str | None, resume: str | None) -> Job:
    """Choose the run folder and the checkpoint.

    Args:
        config: the checked configuration.
        job_id: name of the run folder; a time stamp where it is None, or with `--resume auto` the newest run folder.
        resume: `auto` (the newest complete checkpoint of the run folder, or a fresh start), `none`, or a folder.

    Raises:
        CheckpointError: the checkpoint named does not exist or is not complete.
        ConfigError: the run folder already holds checkpoints and `--resume` does not say what to do with them.
    """
    output_dir = Path(config.run.output_dir)
    explicit = (
        resume if resume not in (None, "auto", "none") else config.run.resume_ckpt_path if resume is None else None
    )
    if explicit is not None:
        path, passed_over = checkpoint(Path(explicit))
        own = output_dir / (job_id or _job_of(path, output_dir) or _time_stamp())
        _refuse_later_ones(own, path)
        return Job(own, path, passed_over)
    if resume == "auto":
        folder = output_dir / job_id if job_id else _newest_run(output_dir)
        if folder is None:
            return Job(output_dir / _time_stamp(), None, ("resume auto: there is no earlier run; starting anew.",))
        found, damaged = checkpoint_files.find(folder / "checkpoints")
        notices = tuple(f"resume auto: passed over: {line}" for line in damaged)
        outcome = f"continuing from {found}." if found else f"no complete checkpoint in {folder}; starting anew."
        return Job(folder, found, (*notices, f"resume auto: {outcome}"), is_free=True)
    folder = output_dir / (job_id or _time_stamp())
    if checkpoint_files.complete_ones(folder / "checkpoints"):
        raise ConfigError(
            "this run folder already holds checkpoints, which a new run would overwrite.",
            where=str(folder),
            hint="Pass --resume auto to continue it, or another --job-id.",
        )
    return Job(folder)


def checkpoint(path: Path) -> tuple[Path, tuple[str, ...]]:
    """`path` itself, or the newest complete checkpoint where it is a run folder or its `checkpoints` folder.

    Returns:
        The checkpoint, and a line for each newer one that was passed over.

    Raises:
        CheckpointError: there is none.
    """
    path = path.expanduser().absolute()
    for folder in (path / "checkpoints", path):
        found, damaged = checkpoint_files.find(folder)
        if found is not None:
            return found, tuple(f"passed over: {line}" for line in damaged)
        if damaged:
            raise CheckpointError("no checkpoint in this folder is complete.", where=str(folder), given=damaged[0])
    checkpoint_files.verify(path)
    return path, ()


def _refuse_later_ones(folder: Path, chosen: Path) -> None:
    """A run that goes back and on again must not mix its checkpoints with those of the future it has left.

    Raises:
        ConfigError: the run folder holds complete checkpoints later than the chosen one.
    """
    newest, _ = checkpoint_files.find(folder / "checkpoints")
    if newest is not None and newest.name > chosen.name:
        raise ConfigError(
            "the run folder holds later checkpoints than the one to resume from.",
            where=str(folder),
            given=f"{chosen.name}, where the newest is {newest.name}",
            hint="Pass another --job-id to branch off, or move the later ones away.",
        )


def _job_of(checkpoint: Path, output_dir: Path) -> str | None:
    """The run that the checkpoint belongs to, if it lies in this output folder."""
    run = checkpoint.parent.parent
    return run.name if checkpoint.parent.name == "checkpoints" and run.parent == output_dir else None


def _newest_run(output_dir: Path) -> Path | None:
    runs = [p.parent for p in output_dir.glob("*/config.yaml")] if output_dir.is_dir() else []
    return max(runs, key=lambda p: (p / "config.yaml").stat().st_mtime, default=None)


def _time_stamp() -> str:
    """A new job id; rank 0's is the one that counts."""
    return time.strftime("%Y%m%d_%H%M%S")


def make_folder(job: Job) -> None:
    """Create the run folder and prove that it can be written.

    Raises:
        ConfigError: it can't.
    """
    try:
        job.checkpoints.mkdir(parents=True, exist_ok=True)
        probe = job.folder / ".write_test"
        probe.write_text(json.dumps({}))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run folder can't be written ({error}).", where="run.output_dir", given=str(job.folder)
        ) from error


def result_file(folder: Path, split: str, step: int) -> Path:
    """The file of an evaluation's scores; predictions have the same name with the ending `.jsonl`."""
    return folder / f"{split}_step_{step:08d}.json"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context that writes what the run has to tell into its folder.

    Raises:
        LavisError: the disk is full, or can't be written any more.
    """
    try:
        yield
    except OSError as error:
        raise LavisError(
            f"the run can't write what it has to tell ({error}).",
            where=str(folder),
            hint="Make room, or mend the disk, and start again with --resume auto: checkpoints are whole.",
        ) from error
