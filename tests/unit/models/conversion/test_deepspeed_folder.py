"""Checkpoint folders of DeepSpeed, as MiniGPT4Qwen's runner and its pipeline trainer write them."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.source import open_weights
from lavis_ds.models.minigpt4qwen import MiniGPT4Qwen
from tests.unit.models.conversion.conftest import (
    LLM,
    Tensors,
    eva_tensors,
    projection_tensors,
    qformer_tensors,
    qwen_tensors,
    without_text,
)

Make = Callable[..., MiniGPT4Qwen]
LAYERS = LLM["num_hidden_layers"]


def whole() -> Tensors:
    """`Minigpt4Qwen.state_dict()`."""
    parts = eva_tensors(prefix="visual_encoder.") | without_text(qformer_tensors()) | projection_tensors()
    return parts | qwen_tensors()


def pipeline_layers(w: Tensors, *, frozen_llm: bool) -> Iterator[Tensors]:
    """One state a layer, in the order of `get_model` in minigpt4qwen_pipe.py."""
    llm = "llm_model.transformer."
    vision = {f"visionpipe.{k}": v for k, v in w.items() if not k.startswith("llm_model.")}
    yield {**vision, "wtepipe.word_embeddings.weight": w[llm + "wte.weight"], "rotary_emb.inv_freq": torch.ones(4)}
    yield from ({} for _ in range(4))
    for n in range(LAYERS):
        yield {k.replace(f"{llm}h.{n}.", "layer."): v for k, v in w.items() if k.startswith(f"{llm}h.{n}.")}
    yield {"final_layernorm.weight": w[llm + "ln_f.weight"]}
    yield {"lm_head.weight": w["llm_model.lm_head.weight"]}
    yield {}
    if frozen_llm:
        yield {"occupy.weight": torch.zeros(10, 10)}


@pytest.fixture(params=[True, False], ids=["frozen_llm", "trained_llm"])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "pp" / "global_step296"
    folder.mkdir(parents=True)
    for number, state in enumerate(pipeline_layers(whole(), frozen_llm=request.param)):
        torch.save(OrderedDict(state), folder / f"layer_{number:02d}-model_states.pt")
    torch.save({"module": None, "global_steps": 296}, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "pp" / "latest").write_text("global_step296\n")
    return folder


@pytest.fixture
def zero2(tmp_path: Path) -> Path:
    folder = tmp_path / "ds" / "epoch_0"
    folder.mkdir(parents=True)
    content = {
        "module": OrderedDict((name, tensor.bfloat16()) for name, tensor in whole().items()),
        "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in projection_tensors().items())],
        "ds_config": {"bf16": {"enabled": True}},
        "ds_version": "0.14.0",
        "config": {"run": {"seed": 42}},
        "epoch": 0,
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "ds" / "latest").write_text("epoch_0")
    return folder


def same(a: MiniGPT4Qwen, b: MiniGPT4Qwen, convert: Callable[[Tensor], Any] = lambda tensor: tensor) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, convert(y)) for x, y in pairs)


@pytest.fixture
def expected(make: Make, tmp_path: Path) -> MiniGPT4Qwen:
    """The model filled from one file, which test_lavis compares with a reference."""
    torch.save(whole(), tmp_path / "whole.pth")
    return make(pretrained=str(tmp_path / "whole.pth"))


@pytest.mark.parametrize("by_latest", [True, False])
def test_pipeline(make: Make, pipeline: Path, expected: MiniGPT4Qwen, by_latest: bool) -> None:
    model = make(pretrained=str(pipeline.parent if by_latest else pipeline))
    assert same(model, expected)
    assert any("a constant of the pipeline (rotary_emb.inv_freq)" in line for line in model.notices)


def test_pipeline_with_a_layer_missing(make: Make, pipeline: Path) -> None:
    (pipeline / "layer_06-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"a layer of this pipeline is missing\. Given: no layer_06"):
        make(pretrained=str(pipeline))


def test_pipeline_with_a_layer_truncated(make: Make, pipeline: Path) -> None:
    path = pipeline / "layer_05-model_states.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"layer_05-model_states\.pt: this file is damaged"):
        make(pretrained=str(pipeline))


@pytest.mark.parametrize("by_latest", [True, False])
def test_whole_model(make: Make, zero2: Path, expected: MiniGPT4Qwen, by_latest: bool) -> None:
    model = make(pretrained=str(zero2.parent if by_latest else zero2))
    assert same(model, expected, lambda tensor: tensor.bfloat16().float())


def test_what_zero_to_fp32_writes(make: Make, tmp_path: Path, expected: MiniGPT4Qwen) -> None:
    tensors = whole()
    names = sorted(tensors)
    folder = tmp_path / "joined"
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate((names[:30], names[30:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(make(pretrained=str(folder)), expected)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        make(pretrained=str(folder))


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"])
def test_pieces_of_tensors_are_refused(make: Make, zero2: Path, name: str) -> None:
    shutil.copy(zero2 / "mp_rank_00_model_states.pt", zero2 / name)
    with pytest.raises(CheckpointError, match=r"a piece of every tensor.*zero_to_fp32\.py"):
        make(pretrained=str(zero2))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds no weights\. Given: notes\.txt\. Expected: model\.safetensors"):
        open_weights(tmp_path)
