"""A model's weights: filled from files of ours or of others, and written to `model.safetensors` by parameter name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lavis_ds.errors import CheckpointError
from lavis_ds.models import frozen
from lavis_ds.models.conversion import lavis
from lavis_ds.models.conversion.lavis import Converted
from lavis_ds.models.conversion.source import INDEX, SINGLE, files_in, open_safetensors, open_weights, weights_folder
from lavis_ds.models.conversion.stored import fill
from lavis_ds.models.frozen import Frozen, Source
from lavis_ds.models.parts import Part
from lavis_ds.models.patterns import is_adapter


@dataclass(frozen=True)
class Loaded:
    """What a source of weights filled.

    Attributes:
        names: the model's tensors that have their values from it.
        notices: what the user should know, a line each.
        source: it, where it can be read again.
    """

    names: frozenset[str]
    notices: tuple[str, ...]
    source: Source | None = None


def load_weights(model: nn.Module, path: str | Path, *, partial: bool = False) -> Loaded:
    """Fill `model` from a file or folder, one tensor at a time. Nothing is changed unless everything fits.

    The kind is recognised by content: weights or a checkpoint of ours; a file of LAVIS or MiniGPT4Qwen; a checkpoint
    folder of DeepSpeed, or of a DeepSpeed pipeline, with either's names.

    Every tensor must be the model's, in the same shape, but for what `conversion.lavis` can account for. Every
    parameter of the model must be there, except those that a part has from a source of its own (`Part.sourced`).
    Frozen ones that a checkpoint leaves out are read from where they came from, and must be what they were.

    Args:
        model: what is filled.
        path: the file or folder.
        partial: parameters may be missing, as long as one that trains is there.

    Raises:
        CheckpointError: there are no weights, a file is damaged, or names or shapes differ; or what a checkpoint leaves
            out is gone or has changed.
    """
    found, left_out = _open(path), left_out_of(path)
    tensors = model.state_dict(keep_vars=True)
    _check_fit(model, tensors, found, path, left_out, partial=partial)
    _fill(model, tensors, found, path, left_out)
    names = frozenset(found.tensors) | left_out.keys()
    source = Source(_key(partial), str(path))
    return Loaded(names, tuple(_notices(found, path, left_out, partial=partial)), source)


def left_out_of(path: str | Path) -> dict[str, Frozen]:
    """Frozen tensors that a folder of weights, or a checkpoint, leaves out; none where it is whole.

    Raises:
        CheckpointError: there is nothing, or the list is damaged.
    """
    return frozen.read(weights_folder(Path(path))) if Path(path).is_dir() else {}


def _open(path: str | Path) -> Converted:
    stored = open_weights(path)
    return lavis.convert(stored) if lavis.is_lavis(stored) else Converted(stored)


def _fill(
    model: nn.Module, tensors: Mapping[str, Tensor], found: Converted, path: str | Path, left_out: Mapping[str, Frozen]
) -> None:
    """Fill the model's `tensors` with what was found, over that from which the checkpoint at `path` left some out."""
    for source in dict.fromkeys(entry.origin.source for entry in left_out.values()):
        if source.key in frozen.WHOLE_MODEL:  # parts have read the others when they were made
            _fill_beneath(model, source, path)
    for name, tensor in found.tensors.items():
        fill(tensors[name], tensor)
    if left_out:
        frozen.check(left_out, {n: frozen.checksums(tensors[n]) for n in left_out if n in tensors}, Path(path))


def _fill_beneath(model: nn.Module, source: Source, checkpoint: str | Path) -> None:
    """Fill what a source has, as it was before the run that left it out of a checkpoint.

    Raises:
        CheckpointError: the source is gone, or is another model's.
    """
    try:
        found, left_out = _open(source.path), left_out_of(source.path)
    except CheckpointError as error:
        raise CheckpointError(
            f"this checkpoint leaves out frozen weights, and where they came from they can't be read: {error.what}",
            where=str(checkpoint),
            given=str(source),
            hint="Put them back there; a link will do.",
        ) from error
    tensors = model.state_dict(keep_vars=True)
    if not any(map(is_adapter, found.tensors)):  # it is older than the adapters that the model has by now
        tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    _check_fit(model, tensors, found, source.path, left_out, partial=None)
    _fill(model, tensors, found, source.path, left_out)


def _key(partial: bool) -> str:
    return frozen.WHOLE_MODEL[partial]


def holds_adapters(path: str | Path) -> bool:
    """Whether weights were saved from a model with adapters.

    Raises:
        CheckpointError: as `load_weights`, as far as names show.
    """
    return any(map(is_adapter, open_weights(path)))


def start_notices(model: nn.Module, loads: Sequence[Loaded]) -> list[str]:
    """What was loaded, and loudly, what starts from random weights."""
    lines = [line for loaded in loads for line in loaded.notices]
    filled = {name for loaded in loads for name in loaded.names}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    left = _unsourced(model) - filled
    if left:
        lines.append(
            f"RANDOM WEIGHTS: {', '.join(_modules(left, sizes))} ({sum(sizes[name] for name in left):,} of "
            f"{sum(sizes.values()):,} parameters). What should not start from scratch needs model.pretrained, or its "
            "part's own path or weights."
        )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad} & left
    if frozen:
        lines.append(f"FROZEN WITH RANDOM WEIGHTS: {', '.join(_modules(frozen, sizes))}. This will never learn.")
    return lines


class WeightsFolder(Mapping[str, Tensor]):
    """The tensors that `save_weights` wrote, each read when it is asked for.

    Raises:
        CheckpointError: there are no weights, or a file is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self._stored = open_weights(folder)

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_keys(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file of a folder that holds it.

    Raises:
        CheckpointError: there are no weights, or a file is missing or damaged.
    """
    root = weights_folder(Path(folder))
    files = files_in(root)
    if not files:
        raise CheckpointError("this folder holds no weights.", where=str(root), expected=f"{SINGLE} or {INDEX}")
    return {key: path for path in files for key in open_safetensors(path).keys()}  # noqa: SIM118


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
        (root / "part-00000").rename(root / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (root / f"part-{number:05d}").rename(root / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (root / INDEX).write_text(json.dumps(index, indent=2))


def _check_fit(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    found: Converted,
    path: str | Path,
    left_out: Mapping[str, Frozen],
    *,
    partial: bool | None,
) -> None:
    """`partial` as in `load_weights`; None where no part has to be there."""
    given = found.tensors
    unknown = [name for name in given if name not in tensors]
    absent = set() if partial is not False else _unsourced(model) - given.keys() - left_out.keys()
    missing = [name for name in absent if not name.startswith(found.may_lack or ("\0",))]
    differing = [
        f"{name} is {tensor.shape} in the file and {tuple(tensors[name].shape)} in the model"
        for name, tensor in given.items()
        if name in tensors and tensor.shape != tuple(tensors[name].shape)
    ]
    findings = [
        f"{len(names)} of {total} {what}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
        for names, total, what in (
            (unknown, len(given), "tensors in the files are not the model's"),
            (missing, len(tensors), "tensors of the model are not in the files"),
            (differing, len(given), "tensors have another shape"),
        )
        if names
    ]
    if findings:
        raise CheckpointError(
            f"these weights do not fit the model; {'; '.join(findings)}.", where=str(path), hint=_hint(missing, unknown)
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if partial and not trained & given.keys():
        raise CheckpointError(
            "none of these tensors is one that trains.",
            where="model.finetuned",
            given=f"{path} with {', '.join(_modules(given, dict.fromkeys(tensors, 1)))}",
            hint="What is frozen belongs into model.pretrained; or take it out of model.freeze.",
        )


def _hint(missing: Sequence[str], unknown: Sequence[str]) -> str:
    if "blocks.0.attn.qkv.weight" in unknown:
        return "This is a vision tower alone: name it in model.vision.weights."
    if not unknown and any(name.startswith("vision.vit.") for name in missing):
        return "BLIP-2's tower has a file of its own: name eva_vit_g.pth in model.vision.weights."
    partly = " Weights of some parts alone belong into model.finetuned." if missing and not unknown else ""
    return f"Were they made with another model.arch or model_type? The run's config.yaml tells.{partly}"


def _notices(found: Converted, path: str | Path, left_out: Mapping[str, Frozen], *, partial: bool) -> list[str]:
    key = _key(partial)
    lines = [f"{key}: {len(found.tensors)} tensors of {path}."]
    if left_out:
        sources = dict.fromkeys(str(entry.origin.source) for entry in left_out.values())
        lines.append(f"{key}: {len(left_out)} more, which it leaves out, from {', '.join(sources)}.")
    if found.left_out:
        parts = [
            f"{len(names)} of {why} ({', '.join(sorted(names)[:2])}{', ...' if names[2:] else ''})"
            for why, names in found.left_out.items()
        ]
        lines.append(f"{key}: left out {'; '.join(parts)}.")
    return lines


def _modules(names: Iterable[str], sizes: dict[str, int]) -> list[str]:
    """The shortest names of at most two components that stand for `names`, and for no others of the model's."""
    wanted, others = set(names), sizes.keys() - set(names)
    parts = sorted({name.split(".")[0] for name in wanted})
    return [
        found
        for part in parts
        for found in (
            sorted({".".join(name.split(".")[:2]) for name in wanted if name.startswith(f"{part}.")})
            if any(name.startswith(f"{part}.") for name in others)
            else [part]
        )
    ]


def _unsourced(model: nn.Module) -> set[str]:
    """First names of the parameters (tied ones count once) that no part has from elsewhere."""
    sourced = tuple(
        f"{prefix}.{name}." if prefix else f"{name}."
        for prefix, module in model.named_modules()
        if isinstance(module, Part)
        for name in module.sourced
    )
    return {name for name, _ in model.named_parameters() if not name.startswith(sourced or ("\0",))}
