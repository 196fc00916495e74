"""Weights that a checkpoint leaves out: frozen ones that can be read again where they came from, and the proof of it.

Such a checkpoint has a file `frozen.json` beside its weights. It names the sources of what is left out, and holds the
checksum of each tensor, in every number format that the run could tell.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lavis_ds import shares
from lavis_ds.errors import CheckpointError
from lavis_ds.models.parts import Part

if TYPE_CHECKING:
    from lavis_ds.models.base import Model
    from lavis_ds.models.weights import Loaded

FILE = "frozen.json"
WHOLE_MODEL = ("model.pretrained", "model.finetuned")
"""Keys of sources that hold weights of any part, and go over the parts' own."""

_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SOURCE_KEYS = ("path", "weights", "model_name")


class Source(NamedTuple):
    """Where weights come from.

    Attributes:
        key: of the configuration, such as `model.language.path`.
        path: what it names: a file, folder, hub id, or model of timm.
    """

    key: str
    path: str

    def __str__(self) -> str:
        return f"{self.key} {self.path}"


class Origin(NamedTuple):
    """Where one tensor comes from.

    Attributes:
        source: what holds it.
        tensor: its name there, as the part or model calls it.
    """

    source: Source
    tensor: str


class Frozen(NamedTuple):
    """One tensor that is left out.

    Attributes:
        origin: where it comes from.
        crc32: number format -> checksum of its bytes.
    """

    origin: Origin
    crc32: Mapping[str, int]

    @property
    def dtype(self) -> torch.dtype:
        """What it had in the run."""
        return max((_FORMATS[name] for name in self.crc32), key=lambda dtype: dtype.itemsize)


def origins(model: Model, loads: Iterable[Loaded]) -> dict[str, Origin]:
    """Where each parameter has its values from; what was made at random, or made of others, is not in it."""
    made = tuple(f"{part}." for part in model.made_parts())
    found = {name: origin for name, origin in _of_parts(model) if not name.startswith(made or ("\0",))}
    for loaded in loads:
        found = {name: origin for name, origin in found.items() if name not in loaded.names}
        if loaded.source is not None and not made:  # else it went into a model of another shape
            found |= {name: Origin(loaded.source, name) for name in loaded.names}
    # PEFT moves a weight that it puts adapters beside.
    plain = {name: name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    return {name: found[old if old in found else name] for name, old in plain.items() if old in found or name in found}


def _of_parts(model: Model) -> Iterator[tuple[str, Origin]]:
    for part, module in model.parts().items():
        source = _source_of(model.config, part)
        if source is None or not isinstance(module, Part):
            continue
        for inner in module.sourced:
            for name, _ in module.get_submodule(inner).named_parameters():
                plain = name.replace(".base_layer.", ".")
                yield f"{part}.{inner}.{plain}", Origin(source, plain)


def _source_of(config: Any, part: str) -> Source | None:
    for options, where in ((getattr(config, part, None), f"model.{part}"), (config, "model")):
        for key in _SOURCE_KEYS:
            if value := getattr(options, key, None):
                return Source(f"{where}.{key}", str(value))
    return None


def checksums(tensor: Tensor) -> dict[str, int]:
    """Number format -> checksum: of the tensor's own, and where that is float32, of what 16-bit runs make of it."""
    own = str(tensor.dtype).removeprefix("torch.")
    formats = list(_FORMATS) if own == "float32" else [own]
    whole = shares.whole(tensor, torch.device("cpu"))
    return {name: _crc32(whole.to(_FORMATS[name])) for name in formats}


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def check(frozen: Mapping[str, Frozen], found: Mapping[str, Mapping[str, int]], where: Path) -> None:
    """Compare the checksums of tensors with those of a checkpoint.

    Raises:
        CheckpointError: some differ, or can't be compared.
    """
    common = {name: entry.crc32.keys() & found.get(name, {}).keys() for name, entry in frozen.items()}
    if unknown := [name for name, formats in common.items() if not formats]:
        raise CheckpointError(
            f"{len(unknown)} frozen tensors that this checkpoint leaves out can't be compared with the model's, which "
            "has them in another number format or not at all.",
            where=str(where),
            given=_some(unknown),
            hint="Set run.precision and the part's dtype as they were.",
        )
    differing = [n for n, formats in common.items() if any(frozen[n].crc32[f] != found[n][f] for f in formats)]
    if differing:
        sources = dict.fromkeys(str(frozen[name].origin.source) for name in differing)
        raise CheckpointError(
            f"{len(differing)} of the {len(frozen)} frozen tensors that this checkpoint leaves out are not what they "
            "were when it was written.",
            where=str(where),
            given=_some(differing),
            expected=f"those of {', '.join(sources)} as they were then",
            hint="What it learned fits no others: put the old files back, or name where they are now.",
        )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:2])}{', ...' if names[2:] else ''}"


def write(folder: Path, frozen: Mapping[str, Frozen]) -> None:
    """Write `frozen.json` into a folder of weights."""
    sources = list(dict.fromkeys(entry.origin.source for entry in frozen.values()))
    sources.sort(key=lambda source: WHOLE_MODEL.index(source.key) if source.key in WHOLE_MODEL else -1)
    tensors = {
        name: {"source": sources.index(entry.origin.source), "tensor": entry.origin.tensor, "crc32": entry.crc32}
        for name, entry in frozen.items()
    }
    content = {"sources": [source._asdict() for source in sources], "tensors": tensors}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read(folder: Path) -> dict[str, Frozen]:
    """What a folder of weights leaves out, by name; nothing where it is whole.

    Raises:
        CheckpointError: its file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        sources = [Source(**source) for source in content["sources"]]
        return {
            name: Frozen(Origin(sources[entry["source"]], entry["tensor"]), entry["crc32"])
            for name, entry in content["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"this file is damaged ({error}).", where=str(path)) from error
