"""What holds weights, a file or a folder, recognised by what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.deepspeed_folder import open_deepspeed
from lavis_ds.models.conversion.pickle_file import open_pickle
from lavis_ds.models.conversion.stored import Stored

_opened = ContextVar[dict[Path, dict[str, Stored]] | None]("opened", default=None)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SETS = ((INDEX, SINGLE), ("pytorch_model.bin.index.json", "pytorch_model.bin"))


@contextmanager
def opened_once() -> Iterator[None]:
    """Inside, weights that are asked for again are not opened again."""
    token = _opened.set({})
    try:
        yield
    finally:
        _opened.reset(token)


def open_weights(path: str | Path) -> dict[str, Stored]:
    """Tensor name -> tensor, of a file, a folder, a checkpoint of a run, or a checkpoint folder of DeepSpeed.

    Raises:
        CheckpointError: there are no weights, or a file is missing, damaged, or no file of weights.
    """
    path, opened = Path(path), _opened.get()
    if opened is None:
        return _open(path)
    if path not in opened:
        opened[path] = _open(path)
    return dict(opened[path])


def _open(path: Path) -> dict[str, Stored]:
    if path.is_file():
        return _open_file(path)
    root = weights_folder(path)
    files = files_in(root)
    if not files:
        tensors = open_deepspeed(root)
        if tensors is None:
            raise _no_weights(root)
        return tensors
    return {name: tensor for file in files for name, tensor in _open_file(file).items()}


def weights_folder(path: Path) -> Path:
    """`path`, or `weights/` in it, as in a run's checkpoint.

    Raises:
        CheckpointError: there is nothing.
    """
    if not path.is_dir():
        raise CheckpointError("there is no such file or folder.", where=str(path))
    return path / "weights" if (path / "weights").is_dir() else path


def files_in(root: Path) -> list[Path]:
    """The files that make up a folder's weights; none where it has neither a file of weights nor an index.

    Raises:
        CheckpointError: a file that the index names is missing.
    """
    for index, single in _SETS:
        if (root / index).is_file():
            files = [root / name for name in sorted(set(_read_index(root / index)))]
            for file in files:
                if not file.is_file():
                    raise CheckpointError(f"{file.name} is missing.", where=str(root), expected=f"all files of {index}")
            return files
        if (root / single).is_file():
            return [root / single]
    return []


def open_safetensors(path: Path) -> Any:
    """A handle of a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"this file of weights is damaged ({error}).",
            where=str(path),
            hint="Compare its size with the original's, and copy it again.",
        ) from error


def _open_file(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix != ".safetensors" and start[8:] != b"{":  # a safetensors file is eight bytes of length, then JSON
        return open_pickle(path)
    handle = open_safetensors(path)
    return {name: Stored(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118


def _read_index(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("this index of weights is damaged.", where=str(path)) from error


def _no_weights(root: Path) -> CheckpointError:
    names = sorted(path.name for path in root.iterdir())
    return CheckpointError(
        "this folder holds no weights.",
        where=str(root),
        given=f"{', '.join(names[:4])}{', ...' if names[4:] else ''}" if names else "an empty folder",
        expected=f"{SINGLE}, pytorch_model.bin, an index of either, or DeepSpeed's *_model_states.pt",
    )
