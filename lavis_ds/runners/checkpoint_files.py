"""What a checkpoint folder is, and which ones are complete. Plain files and JSON: nothing here needs torch.

Layout of `checkpoints/step_00001000/`:

| path | content |
|---|---|
| `engine/` | the engine's shards: what an exact continuation needs |
| `weights/` | the model's weights, whole, as safetensors: what evaluation, the next stage and other tools need |
| `train_state.json` | `TrainState` |
| `rng/rank_00000.pt` | random states of each rank (tensors only) |
| `data/rank_00000.json` | where each rank's stream goes on, where data is read as a stream |
| `config.yaml` | the resolved configuration |
| `manifest.json` | layout, versions, and the size of every file |
| `COMPLETE` | written last |
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lavis_ds.errors import CheckpointError

COMPLETE = "COMPLETE"
LATEST = "latest"


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def begin(final: Path) -> Path:
    """An empty folder to write a checkpoint into, beside its final name."""
    partial = final.parent / f".partial_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("engine", "rng"):
        (partial / name).mkdir(parents=True)
    return partial


def finish(partial: Path, final: Path, layout: dict[str, Any], versions: dict[str, str], keep_last: int) -> None:
    """Mark a written checkpoint complete, give it its name, point `latest` at it, remove the oldest."""
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    manifest = {"format": 1, "layout": layout, "versions": versions, "files": files}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (partial / COMPLETE).touch()
    if final.exists():
        _remove(final)
    partial.rename(final)
    temporary = final.parent / f".{LATEST}"
    temporary.write_text(final.name + "\n")
    temporary.rename(final.parent / LATEST)
    others = [path for path in complete_ones(final.parent) if path != final]  # a damaged one may be of a later step
    for path in others[: max(0, len(others) + 1 - keep_last)]:
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
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest can't be read ({error}).", where=str(path)) from error
    for name, size in files.items():
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


def find(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint under `folder`, and a line for each newer one that was passed over."""
    passed_over = []
    for path in sorted(folder.glob("step_*"), reverse=True):
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
