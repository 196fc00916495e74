"""Tensors in a `.pth`, `.pt` or `.bin` file. Such files are pickles, which could run any code; these can't."""

from __future__ import annotations

import pickle
import re
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lavis_ds import distributed, shares
from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.stored import Stored

_WRAPPERS = ("model", "module", "state_dict")
"""Keys under which LAVIS, DeepSpeed and others keep the tensors, beside optimizer, epoch and the like."""


def open_pickle(path: Path, *, may_be_empty: bool = False) -> dict[str, Stored]:
    """Tensor name -> tensor, mapped from the file rather than read (but for files from before PyTorch 1.6).

    Raises:
        CheckpointError: the file is damaged, holds more than plain data, or (unless it may) no tensors by name.
    """
    content = _load(path)
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not (tensors or may_be_empty):
        raise CheckpointError(
            "this file holds no tensors by name.",
            where=str(path),
            given=f"a {type(content).__name__}",
            expected=f"a mapping of names to tensors, bare or under {', '.join(_WRAPPERS)}",
        )
    wrapped = all(name.startswith("module.") for name in tensors)  # by DistributedDataParallel
    return {name.removeprefix("module.") if wrapped else name: Stored(tensor) for name, tensor in tensors.items()}


def _load(path: Path) -> Any:
    is_mapped = zipfile.is_zipfile(path)
    if is_mapped or not shares.is_active():
        return _read(path, mmap=is_mapped)
    with _copy_to_map(path) as copy:
        return _read(copy, mmap=True)


@contextmanager
def _copy_to_map(path: Path) -> Iterator[Path]:
    """A file from before PyTorch 1.6 in the format of today, made by one rank of each machine, which alone holds it."""
    name = distributed.broadcast_object(uuid.uuid4().hex)
    copy = Path(tempfile.gettempdir()) / f"lavis_ds_{name}.pt"
    try:
        if distributed.local_rank() == 0:
            torch.save(_read(path, mmap=False), copy)
        distributed.barrier()
        yield copy
        distributed.barrier()
    finally:
        if distributed.local_rank() == 0:
            copy.unlink(missing_ok=True)  # what is mapped stays until it is closed


def _read(path: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        found = re.search(r"global:? (?:GLOBAL )?([\w.]+)", str(error))
        if found is None:
            raise _damaged(path, error) from error
        raise CheckpointError(
            f"this file holds more than tensors and plain values ({found[1]}), and to open that could run any code.",
            where=str(path),
            hint="Save its tensors alone on a machine where you trust it: torch.save(torch.load(FILE, "
            "weights_only=False)['model'], NEW_FILE), with the key that holds them.",
        ) from error
    except Exception as error:  # what a damaged pickle raises depends on where it breaks
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())[:150]
    return CheckpointError(
        f"this file is damaged, or no file of weights ({type(error).__name__}{f': {text}' if text else ''}).",
        where=str(path),
        hint="Compare its size with the original's, and copy it again.",
    )
