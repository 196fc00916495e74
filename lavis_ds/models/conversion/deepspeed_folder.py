"""Tensors in a checkpoint folder of DeepSpeed: the whole model's, or a pipeline's, one file a layer.

Source of the pipeline's names: https://github.com/Coobiw/MPP-LLaVA (`minigpt4qwen_models/minigpt4qwen_pipe.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.pickle_file import open_pickle
from lavis_ds.models.conversion.stored import Stored

_LAYER = re.compile(r"layer_(\d+)-(?:model_00-)?model_states\.pt")
_WHOLE = "mp_rank_00_model_states.pt"

_PIPELINE = (
    ("visionpipe.", ""),
    ("wtepipe.word_embeddings.", "llm_model.transformer.wte."),
    ("final_layernorm.", "llm_model.transformer.ln_f."),
    ("lm_head.", "llm_model.lm_head."),
)
"""How a name in a layer's file begins, and how it does in the whole model."""


def open_deepspeed(root: Path) -> dict[str, Stored] | None:
    """Tensor name -> tensor; None where the folder is no such checkpoint. A folder with `latest` is followed.

    Raises:
        CheckpointError: a file is missing or damaged, or every tensor is spread over several files.
    """
    latest = root / "latest"
    if latest.is_file() and (root / latest.read_text().strip()).is_dir():
        return open_deepspeed(root / latest.read_text().strip())
    layers = {int(found[1]): path for path in root.glob("layer_*") if (found := _LAYER.fullmatch(path.name))}
    pieces = ("layer_*-model_01-*", "mp_rank_01_*", "zero_pp_rank_*_model_states.pt")
    sharded = sorted(path.name for pattern in pieces for path in root.glob(pattern))
    if sharded:
        raise CheckpointError(
            "this checkpoint is of ZeRO-3 or tensor parallelism: each file has a piece of every tensor.",
            where=str(root),
            given=sharded[0],
            hint="Join them with `python zero_to_fp32.py . joined`, a script that lies beside DeepSpeed's checkpoints, "
            "and name the folder `joined`.",
        )
    if layers:
        return _pipeline(root, layers)
    return open_pickle(root / _WHOLE) if (root / _WHOLE).is_file() else None


def _pipeline(root: Path, layers: dict[int, Path]) -> dict[str, Stored]:
    """The layers joined under MiniGPT4Qwen's names; decoder layers count from the first file that holds one."""
    tensors: dict[str, Stored] = {}
    blocks: list[int] = []
    for number, path in sorted(layers.items()):
        stored = open_pickle(path, may_be_empty=True)  # a layer of the loss has none
        if any(name.startswith("layer.") for name in stored):
            blocks.append(number)
            block = f"llm_model.transformer.h.{number - blocks[0]}."
            stored = {block + name.removeprefix("layer."): tensor for name, tensor in stored.items()}
        tensors |= {_renamed(name): tensor for name, tensor in stored.items()}
    missing = sorted(set(range(max(layers))) - layers.keys())
    if missing:
        given = f"no layer_{missing[0]:02d}"
        raise CheckpointError("a layer of this pipeline is missing.", where=str(root), given=given)
    return tensors


def _renamed(name: str) -> str:
    for old, new in _PIPELINE:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
