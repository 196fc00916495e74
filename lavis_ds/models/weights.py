"""A model's weights in a folder: `model.safetensors`, or `model-*.safetensors` with an index, by parameter name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lavis_ds.errors import CheckpointError
from lavis_ds.models.parts import Part

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill `model` from `folder`, or from `weights/` in it. Nothing is changed unless everything fits.

    Every tensor of the files must be the model's, in the same shape. Every parameter of the model must be in the files,
    except those that a part has from a source of its own (`Part.sourced`).

    Raises:
        CheckpointError: the folder holds no weights, a file is damaged, or names or shapes differ.
    """
    keys = read_keys(folder)
    tensors = model.state_dict(keep_vars=True)
    _check_fit(model, tensors, keys, folder)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for key, path in keys.items():
        by_file[path].append(key)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in names:
                tensors[name].copy_(file.get_tensor(name))


def read_keys(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        CheckpointError: there are no weights, or a file is missing or damaged.
    """
    folder = Path(folder)
    root = folder / "weights" if (folder / "weights").is_dir() else folder
    if (root / _INDEX).is_file():
        files = [root / name for name in sorted(set(_read_index(root / _INDEX).values()))]
    else:
        files = [root / _SINGLE]
    keys: dict[str, Path] = {}
    for path in files:
        if not path.is_file():
            what = "there is no such folder." if not folder.is_dir() else f"{path.name} is missing."
            raise CheckpointError(what, where=str(root), expected=f"a folder with {_SINGLE} or {_INDEX}")
        with _open(path) as file:
            keys.update(dict.fromkeys(file.keys(), path))
    return keys


def save_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: str | Path, *, write: bool = True, max_shard_bytes: int = 4 * 2**30
) -> None:
    """Write named tensors so that `load_weights` reads them; one shard at a time is in memory.

    Args:
        tensors: name and whole tensor, one after the other; each may be freed after its turn.
        folder: made if it is missing.
        write: False on ranks that only take part in gathering; they go through `tensors` just the same.
        max_shard_bytes: largest file.
    """
    root = Path(folder)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, root / f"part-{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0

    if write:
        root.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors:
        if not write:
            continue
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > max_shard_bytes:
            flush()
        pending[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        pending_bytes += size
        total_bytes += size
    if write:
        flush()
        _name_shards(root, shards, total_bytes)


def _name_shards(root: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the parts their final names, which hold the number of files, and write the index."""
    if len(shards) == 1:
        (root / "part-00000").rename(root / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (root / f"part-{number:05d}").rename(root / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (root / _INDEX).write_text(json.dumps(index, indent=2))


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("this index of weights is damaged.", where=str(path)) from error
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"this file of weights is damaged ({error}).", where=str(path)) from error


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], keys: dict[str, Path], folder: str | Path) -> None:
    unknown = [key for key in keys if key not in tensors]
    missing = _required(model, tensors) - keys.keys()
    shapes = _shapes(keys)
    differing = [
        f"{key} is {shapes[key]} in the file and {tuple(tensors[key].shape)} in the model"
        for key in keys
        if key in tensors and shapes[key] != tuple(tensors[key].shape)
    ]
    findings = [
        f"{len(names)} of {total} {what}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for names, total, what in (
            (unknown, len(keys), "tensors in the files are not the model's"),
            (missing, len(tensors), "tensors of the model are not in the files"),
            (differing, len(keys), "tensors have another shape"),
        )
        if names
    ]
    if findings:
        raise CheckpointError(
            f"these weights do not fit the model; {'; '.join(findings)}.",
            where=str(folder),
            hint="Were they made with another model.arch or model_type? The run's config.yaml tells.",
        )


def _required(model: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """First names of the parameters (tied ones count once) that no part has from elsewhere."""
    sourced = tuple(
        f"{prefix}.{name}." if prefix else f"{name}."
        for prefix, module in model.named_modules()
        if isinstance(module, Part)
        for name in module.sourced
    )
    return {name for name, _ in model.named_parameters() if not name.startswith(sourced or ("\0",))}


def _shapes(keys: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(keys.values()):
        with _open(path) as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes
