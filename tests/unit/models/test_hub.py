"""Folders as on the hub that are not what they should be: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from lavis_ds.errors import CheckpointError
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM

Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, tokenizer_dir: str, qwen3: dict[str, Any]) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    shape = Qwen3Config(**{k: v for k, v in qwen3.items() if k != "model_type"}, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def build(folder: Path) -> HFCausalLM:
    return HFCausalLM(HFCausalLMConfig.model_validate({"path": str(folder)}))


def edit_config(**values: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def edit_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        save_file(change(tensors), file, metadata={"format": "pt"})

    return spoil


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_a_shard(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"can't be loaded: it is no model: it has no config\.json"),
        (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "it has no tokenizer files"),
        (lambda folder: (folder / "config.json").write_text("{"), "lm can't be loaded: Expecting property name"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no file named model\.safetensors"),
        (truncate, "lm can't be loaded: Error while deserializing header"),
        (lose_a_shard, r"No such file or directory: .*model-00001-of-00001\.safetensors"),
        (edit_config(intermediate_size=48), r"other shapes of 6 tensors: .*is \(32, 64\), not \(32, 48\)"),
        (edit_config(model_type="nonesuch"), "model type `nonesuch`"),
        (
            edit_config(model_type="nonesuch", auto_map={"AutoConfig": "own.Config"}),
            "needs Python code of its own, which is never run",
        ),
        (edit_weights(lambda w: {k: v for k, v in w.items() if k != NORM}), rf"They lack 1 tensors: {NORM}\."),
        (edit_weights(lambda w: w | {"model.extra": torch.ones(2)}), r"no place for, 1 tensors: model\.extra\."),
        (edit_weights(lambda w: {f"h.{k}": v for k, v in w.items()}), r"lack 2\d tensors.* of another architecture"),
    ],
)
def test_one_sentence(folder: Path, spoil: Spoil, text: str) -> None:
    build(folder)
    spoil(folder)
    with pytest.raises(CheckpointError, match=text) as caught:
        build(folder)
    assert str(caught.value).startswith("model.language.")
    assert "\n" not in str(caught.value)
