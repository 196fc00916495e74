"""Save and load a checkpoint, all ranks together. See `checkpoint_files` for what is in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import lavis_ds
from lavis_ds import distributed
from lavis_ds.engines.base import Engine
from lavis_ds.errors import CheckpointError
from lavis_ds.models.weights import save_weights
from lavis_ds.runners import checkpoint_files
from lavis_ds.runners.state import TrainState


def save(
    folder: Path,
    engine: Engine,
    state: TrainState,
    config_yaml: str,
    keep_last: int,
    data_state: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of this step under `folder`; called on all ranks. Returns its path.

    `data_state` is what this rank's batches need to go on, where they need anything.

    It is written beside its final name and renamed when every rank is done, so a run killed at any moment leaves either
    the whole checkpoint or none.
    """
    final = checkpoint_files.step_folder(folder, state.step)
    partial = distributed.broadcast_object(checkpoint_files.begin(final) if distributed.is_main() else None)
    assert partial is not None
    engine.save(partial / "engine")
    save_weights(engine.full_tensors(), partial / "weights", write=distributed.is_main())
    torch.save(_rng_state(), partial / "rng" / _rng_file())
    if data_state:
        (partial / "data").mkdir(exist_ok=True)
        (partial / "data" / _data_file()).write_text(json.dumps(data_state) + "\n")
    distributed.barrier()
    if distributed.is_main():
        state.save(partial / "train_state.json")
        (partial / "config.yaml").write_text(config_yaml)
        checkpoint_files.finish(partial, final, engine.describe(), _versions(), keep_last)
    distributed.barrier()
    return final


def load(path: Path, engine: Engine, state: TrainState) -> dict[str, Any]:
    """Restore engine, counters and random states; called on all ranks.

    Returns:
        What this rank's batches need to go on, where they need anything.

    Raises:
        CheckpointError: the checkpoint is incomplete, of another layout, or of other data.
    """
    manifest = checkpoint_files.verify(path)
    _check_layout(path, manifest["layout"], engine.describe())
    state.restore(path / "train_state.json")
    engine.load(path / "engine")
    rng = path / "rng" / _rng_file()
    if rng.is_file():  # a rank that did not exist then starts with its own seed
        _restore_rng(torch.load(rng, weights_only=True))
    data = path / "data" / _data_file()
    return dict(json.loads(data.read_text())) if data.is_file() else {}


def _check_layout(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    keys = ["engine", "zero_stage", "precision"] + (["data_parallel_size"] if current["engine"] == "deepspeed" else [])
    different = [key for key in keys if saved.get(key) != current.get(key)]
    if different:
        raise CheckpointError(
            "this checkpoint has another layout than the run.",
            where=str(path),
            given=", ".join(f"{key}={current.get(key)}" for key in different),
            expected=", ".join(f"{key}={saved.get(key)}" for key in different),
            hint="Resume with the settings it was made with, or start anew from its weights with model.pretrained.",
        )


def _versions() -> dict[str, str]:
    return {"lavis_ds": lavis_ds.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _rng_file() -> str:
    return f"rank_{distributed.global_rank():05d}.pt"


def _data_file() -> str:
    return f"rank_{distributed.global_rank():05d}.json"


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
