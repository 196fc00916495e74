"""What a checkpoint folder is, and which ones are complete. Plain files and JSON: nothing here needs torch.

Layout of `checkpoints/step_00001000/`:

| path | content |
|---|---|
| `optimizer/` | float32 masters and moments, each rank's stretches of them (`engines.fragments`) |
| `weights/` | the model's weights, whole, as safetensors: what evaluation, the next stage and other tools need |
| `train_state.json` | `TrainState` |
| `rng/rank_00000.pt` | random states of each rank (tensors only) |
| `data/rank_00000.json` | where each rank's stream goes on, where data is read as a stream |
| `config.yaml` | the resolved configuration |
| `manifest.json` | layout, versions, and size and checksum of every file |
| `COMPLETE` | written last, when all of it is on the disk under its final name |
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lavis_ds.errors import CheckpointError
from lavis_ds.runners import checksums
from lavis_ds.runners.checksums import Content

COMPLETE = "COMPLETE"
LOSS_SCALE = "loss_scale.json"
LATEST = "latest"
FORMAT = 2
"""Of the layout above; 1 held DeepSpeed's own shards."""

_PARTIAL = ".partial_"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder."""
    return int(path.name.removeprefix("step_"))


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises:
    CheckpointError: the disk has no room for a checkpoint of this size.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            "there is no room for a checkpoint.",
            where=str(folder),
            given=f"{free / 2**30:.1f} GiB free",
            expected=f"about {needed_bytes / 2**30:.1f} GiB",
            hint="Make room, lower run.keep_last, or choose another run.output_dir. Nothing was written or removed.",
        )


def rng_file(global_rank: int) -> str:
    """Name of a rank's random states in a checkpoint."""
    return f"rng/rank_{global_rank:05d}.pt"


def data_file(global_rank: int) -> str:
    """Name of the place where a rank's stream goes on, in a checkpoint."""
    return f"data/rank_{global_rank:05d}.json"


def begin(final: Path) -> Path:
    """An empty folder to write a checkpoint into, beside its final name."""
    partial = final.parent / f"{_PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("optimizer", "rng", "data"):
        (partial / name).mkdir(parents=True)
    return partial


def clear(folder: Path) -> None:
    """Remove what runs have left that died while they wrote or removed checkpoints: it takes the room of the next."""
    newest = max(complete_ones(folder), default=None)
    for path in [*folder.glob(f"{_PARTIAL}*"), *folder.glob("step_*")]:
        is_removed = newest is not None and path.name < newest.name and not (path / COMPLETE).exists()
        if path.name.startswith(_PARTIAL) or is_removed:
            shutil.rmtree(path)


class Keep(NamedTuple):
    """Which complete checkpoints stay.

    Attributes:
        last: number of newest ones.
        every: those of steps that this divides.
        best_step: the one of this step.
    """

    last: int
    every: int | None = None
    best_step: int | None = None

    def dispensable(self, paths: Sequence[Path], newest: Path) -> list[Path]:
        """Those of `paths`, oldest first, that may go; `newest`, though it may not be of the latest step, stays."""
        others = [path for path in paths if path != newest]
        old = others[: max(0, len(others) + 1 - self.last)]
        return [p for p in old if step_of(p) != self.best_step and (self.every is None or step_of(p) % self.every)]


def flush(paths: Iterable[Path]) -> None:
    """Return when these files and folders are on the disk, so that a power cut no longer harms them."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):  # some have none of folders
                raise
        finally:
            os.close(handle)


def written(root: Path) -> list[str]:
    """Names of all files in a folder, relative to it, but for hidden ones.

    safetensors writes into such a one before it gives a file its name, and other ranks may be about to.
    """
    names = (path.relative_to(root) for path in root.rglob("*") if not path.name.startswith(".") and path.is_file())
    return sorted(map(str, names))


def finish(
    partial: Path,
    final: Path,
    layout: dict[str, Any],
    versions: dict[str, str],
    keep: Keep,
    files: Mapping[str, Content],
) -> None:
    """Name a written checkpoint of these files, mark it complete, point `latest` at it, remove those not kept.

    The mark comes after the name, since there are file systems that rename a folder file by file; and others are
    removed after all of it is on the disk.
    """
    entries = {name: files[name]._asdict() for name in sorted(files)}
    manifest = {"format": FORMAT, "layout": layout, "versions": versions, "files": entries}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    flush([partial / "manifest.json", partial])
    if final.exists():
        _remove(final)
    partial.rename(final)
    (final / COMPLETE).touch()
    flush([final / COMPLETE, final, final.parent])
    temporary = final.parent / f".{LATEST}"
    temporary.write_text(final.name + "\n")
    temporary.rename(final.parent / LATEST)
    for path in keep.dispensable(complete_ones(final.parent), final):
        _remove(path)


def _remove(path: Path) -> None:
    (path / COMPLETE).unlink(missing_ok=True)  # first, so that a kill in between leaves nothing that looks complete
    shutil.rmtree(path)


def complete_ones(folder: Path) -> list[Path]:
    """Folders with a completion mark, oldest first."""
    return sorted(p for p in folder.glob("step_*") if (p / COMPLETE).is_file()) if folder.is_dir() else []


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: it is missing, was not finished, or a file has another size than when it was written.
    """
    if not path.is_dir():
        raise CheckpointError(
            "there is no such checkpoint folder.", where=str(path), hint=_known_checkpoints(path.parent)
        )
    if not (path / COMPLETE).is_file():
        raise CheckpointError(
            "this checkpoint was not finished.", where=str(path), hint=_known_checkpoints(path.parent)
        )
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
        files = {name: Content(**entry) for name, entry in manifest["files"].items()} if is_ours(manifest) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest can't be read ({error}).", where=str(path)) from error
    if not is_ours(manifest):
        raise CheckpointError(
            "this checkpoint was written by another version of lavis_ds and can't be gone on with.",
            where=str(path),
            given=f"format {manifest.get('format')}",
            expected=f"{FORMAT}",
            hint="Start anew from its weights: model.pretrained takes the folder.",
        )
    for name, (size, _) in files.items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            raise CheckpointError(
                "a file is missing." if actual is None else "a file has changed since it was written.",
                where=str(path / name),
                given="no file" if actual is None else f"{actual} bytes",
                expected=f"{size} bytes",
                hint=_known_checkpoints(path.parent),
            )
    return manifest


def is_ours(manifest: Mapping[str, Any]) -> bool:
    """Whether this version reads checkpoints of that format."""
    return manifest.get("format") == FORMAT


def changed(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those files of a checkpoint that no longer hold what was written, or can't be read, by reading them."""
    return checksums.changed(path, {name: Content(**manifest["files"][name]) for name in names})


def find(folder: Path, *, before: Path | None = None) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint under `folder`, and a line for each newer one that was passed over.

    `before` leaves out that one and all later ones.
    """
    passed_over = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        if before is not None and path.name >= before.name:
            continue
        try:
            verify(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, passed_over
    return None, passed_over


def _known_checkpoints(folder: Path) -> str:
    names = ", ".join(path.name for path in complete_ones(folder))
    return f"Complete ones beside it: {names}." if names else "There is no complete checkpoint beside it."
