"""`lavis-ds export`: a checkpoint as a folder that plain transformers loads, with the same logits."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from lavis_ds.config.load import load
from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import ConfigError
from lavis_ds.models.adapters import adapted_layers
from lavis_ds.models.base import Model
from lavis_ds.models.skeleton import skeleton
from lavis_ds.models.weights import left_out_of
from lavis_ds.runners import build, job
from lavis_ds.runners.export import adapters, check
from lavis_ds.runners.export.families import target_of
from lavis_ds.runners.export.settings import Settings, entry_of
from lavis_ds.runners.export.shards import Writer
from lavis_ds.runners.export.stored import Stored, common_dtype, stored_tensors, tensors_of
from lavis_ds.runners.export.target import Target, checked
from lavis_ds.runners.observers.numbers import size_bytes
from lavis_ds.runners.output import require_folder

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPARE_BYTES = 64 * 2**20


def export(
    checkpoint: str,
    output: str,
    *,
    dtype: str = "auto",
    adapter: str = "merge",
    dataset: str | None = None,
    verify: bool = True,
) -> int:
    """Write the folder, check it, and say what was found.

    It is written beside `output` and takes that name once it is known to be right.

    Args:
        checkpoint: checkpoint folder, or a run folder for its newest one.
        output: the folder to make; it may exist if it is empty.
        dtype: `auto` (as most of the checkpoint), `float32`, `bfloat16` or `float16`.
        adapter: `merge` adds what adapters have learned to the weights; `keep` writes them apart, as a PEFT adapter.
        dataset: entry of `datasets:` whose processors go with the model; the first with pictures where None.
        verify: load the folder in a fresh process and compare.

    Raises:
        CheckpointError: there is no complete checkpoint, or the exported model is not the same.
        ConfigError: transformers has no place for the model or its processors, or the folder can't be written.
    """
    folder, passed_over = job.checkpoint(Path(checkpoint))
    print("".join(f"{line}\n" for line in passed_over), end="", file=sys.stderr)
    final = _free_place(Path(output).expanduser().absolute())
    config, stored = _opened(folder)
    entry = entry_of(config, dataset)

    model = skeleton(adapters.with_parts(config.model, lora=None, dtype=None))
    target = target_of(model)
    settings = Settings(config, entry, model, target)
    weights = _weights(config, stored, keep=adapter == "keep")
    chosen = DTYPES[dtype] or common_dtype(weights.whole.values())
    writer = Writer(target, checked(target, weights.whole), weights.whole, chosen)
    _check_room(final, writer.num_bytes)

    partial = final.parent / f".partial_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    num_files = writer.write(partial)
    settings.write(partial, chosen)
    if weights.adapted is not None:
        adapters.save_adapter(weights.adapted, stored, target, partial / adapters.FOLDER, chosen)
    findings = ["not loaded and not compared"]
    if verify:
        findings = _findings(config, entry, target, partial, chosen, merge=weights.adapted is None)
    partial.rename(final)
    print(f"{final}: {target.model_class.__name__}, {size_bytes(writer.num_bytes)} of weights in {num_files} file(s)")
    print("".join(f"  {finding}\n" for finding in findings), end="")
    return 0


def _free_place(output: Path) -> Path:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            "this is no empty folder, and nothing is overwritten.", where="--to", given=output, hint="Name another."
        )
    require_folder(output.parent, "--to")
    return output


def _opened(folder: Path) -> tuple[RootConfig, dict[str, Stored]]:
    """The run as it is exported, and its tensors.

    What was stored in 4 bits is not in a checkpoint: those weights come from the model's own source, at full precision.
    So does what was left out since it is frozen. These are the only ones that are in memory as a whole.
    """
    config = load(folder / "config.yaml").config
    own = {"pretrained": str(folder), "finetuned": None}
    model = adapters.with_parts(config.model, quantize=None).model_copy(update=own)
    opened = config.model_copy(update={"model": model})
    if adapters.is_quantised(config.model):
        return opened, tensors_of(build.build_model(opened))
    stored, left_out = stored_tensors(folder), left_out_of(folder)
    if left_out:
        whole = tensors_of(build.build_model(opened))
        stored |= {name: whole[name].cast(entry.dtype) for name, entry in left_out.items()}
    return opened, stored


@dataclass(frozen=True)
class _Weights:
    """The tensors to write.

    Attributes:
        whole: those of the model without adapters.
        adapted: the model with its adapters, where these are written apart.
    """

    whole: dict[str, Stored]
    adapted: Model | None = None


def _weights(config: RootConfig, stored: dict[str, Stored], *, keep: bool) -> _Weights:
    adapted = skeleton(config.model)
    if not any(adapted_layers(adapted)):
        return _Weights(stored)
    if keep:
        return _Weights(adapters.base_tensors(adapted, stored), adapted)
    return _Weights(adapters.merged_tensors(adapted, stored))


def _check_room(final: Path, num_bytes: int) -> None:
    parent = next(path for path in final.parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes + _SPARE_BYTES:
        raise ConfigError(
            "the disk has no room for the exported model.",
            where="--to",
            given=f"{size_bytes(free)} free at {parent}",
            expected=size_bytes(num_bytes + _SPARE_BYTES),
        )


def _findings(
    config: RootConfig, entry: str, target: Target, folder: Path, dtype: torch.dtype, *, merge: bool
) -> list[str]:
    """Compare, and say how far the two are from each other."""
    with tempfile.TemporaryDirectory() as work:
        samples = check.expected(config, entry, target, Path(work), dtype, merge=merge)
        found = check.compare(folder, samples, target, Path(work))
    return ["loaded by plain transformers in a process of its own:", *(f"  {agreement}" for agreement in found)]
