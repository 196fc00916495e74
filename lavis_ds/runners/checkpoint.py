"""Go on from a checkpoint, all ranks together. See `checkpoint_files` for what is in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lavis_ds import distributed
from lavis_ds.engines.base import Engine
from lavis_ds.engines.fragments import StoredFragments
from lavis_ds.errors import CheckpointError
from lavis_ds.models.weights import WeightsFolder, left_out_of
from lavis_ds.runners import checkpoint_files
from lavis_ds.runners.left_out import FrozenWeights
from lavis_ds.runners.state import TrainState


def damaged(path: Path) -> list[str]:
    """Files of a complete checkpoint that no longer hold what was written; ranks share the reading of it."""
    manifest = checkpoint_files.verify(path)
    share = sorted(manifest["files"])[distributed.global_rank() :: distributed.world_size()]
    found = distributed.gather_objects(checkpoint_files.changed(path, manifest, share))
    return sorted(name for names in found for name in names)


class Resumed(NamedTuple):
    """What was restored besides the state itself.

    Attributes:
        data_state: what this rank's batches need to go on, where they need anything.
        notices: what the user should know, a line each.
        is_whole: whether all weights are the checkpoint's, frozen ones too.
    """

    data_state: dict[str, Any]
    notices: list[str]
    is_whole: bool = True


def load(path: Path, engine: Engine, state: TrainState, frozen: FrozenWeights | None = None) -> Resumed:
    """Restore weights, optimizer, counters and random states; called on all ranks, of any number and any engine.

    Frozen weights that the checkpoint leaves out must be in the engine already: `frozen` tells.

    Raises:
        CheckpointError: the checkpoint is incomplete, of another model, or of other data.
    """
    manifest = checkpoint_files.verify(path)
    state.restore(path / "train_state.json")
    left_out = left_out_of(path)
    if left_out:
        (frozen or FrozenWeights(engine, {})).verify(left_out, path)
    fresh = fill(path, engine)
    rng = path / checkpoint_files.rng_file(distributed.global_rank())
    if rng.is_file():  # a rank that did not exist then starts with its own seed
        _restore_rng(torch.load(rng, weights_only=True))
    saved, current = manifest["layout"], engine.describe()
    notices = [_changed_layout(path, saved, current)] if saved != current else []
    if fresh:
        more = ", ..." if fresh[3:] else ""
        notices.append(
            f"{len(fresh)} parameters did not train before; their moments start anew: {', '.join(fresh[:3])}{more}."
        )
    return Resumed(_data_state(path, saved, current), notices, is_whole=not left_out)


def fill(path: Path, engine: Engine) -> list[str]:
    """Restore weights and optimizer, but for what the checkpoint leaves out. Called on all ranks.

    Returns:
        Names of parameters that did not train then, on any rank.
    """
    scaler = path / "optimizer" / checkpoint_files.LOSS_SCALE
    scaler_state = json.loads(scaler.read_text()) if scaler.is_file() else {}
    stored, weights = StoredFragments(path / "optimizer"), WeightsFolder(path / "weights")
    fresh = engine.restore(stored, weights, scaler_state, left_out_of(path))
    return sorted({name for names in distributed.gather_objects(fresh) for name in names})


def _changed_layout(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> str:
    different = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    changes = ", ".join(f"{key} {saved.get(key, 'none')} -> {current.get(key, 'none')}" for key in different)
    return f"{path.name} was made with another layout and goes on in this one: {changes}."


def _data_state(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """What this rank's stream needs to go on.

    Raises:
        CheckpointError: data is read as a stream, which can't be shared out among another number of ranks.
    """
    if not any((path / "data").glob("rank_*")):
        return {}
    size, before = current["data_parallel_size"], saved["data_parallel_size"]
    if size != before:
        raise CheckpointError(
            "data that is read as a stream can't go on at another number of ranks.",
            where=str(path / "data"),
            given=f"{size} ranks",
            expected=f"{before}",
            hint="Index the shards (`lavis-ds data index`) before a run, and it can.",
        )
    return dict(json.loads((path / checkpoint_files.data_file(distributed.global_rank())).read_text()))


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
