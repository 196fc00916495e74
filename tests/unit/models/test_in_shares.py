"""A model that is built in shares has the weights of one that is not, bit by bit, whatever they are made or read from.

One process has the only share here; `tests/multi/test_streamed_build.py` does with several what differs there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from lavis_ds import registry, shares
from lavis_ds.models.base import Model
from lavis_ds.models.weights import save_weights
from tests.unit.models.conftest import QWEN3, VIT
from tests.unit.models.conversion.conftest import (
    eva_tensors,
    projection_tensors,
    qformer_tensors,
    qwen_tensors,
    without_text,
)
from tests.unit.models.test_projectors import C_ABSTRACTOR, PERCEIVER
from tests.unit.models.test_qwen_vl import SHAPES
from tests.unit.models.test_siglip2_naflex import VISION
from tests.unit.models.test_skeleton import CLIP, QFORMER, config_of, save

Tree = Callable[..., dict[str, Any]]

HF_QWEN3 = {**QWEN3, "vocab_size": 512, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True)
def _nearly_all_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MIN_ELEMENTS", 33)  # all matrices, and vectors stay whole as they do in large models


def build(tree: dict[str, Any]) -> Model:
    config = config_of(tree)
    torch.manual_seed(0)
    made: Model = registry.get_model_class(config.arch).from_config(config)
    return made


def built_in_shares(tree: dict[str, Any]) -> Model:
    with shares.building():
        made = build(tree)
    assert not shares.is_active()
    return made


def assert_equal(tree: dict[str, Any], *, at_least: int = 20) -> tuple[Model, Model]:
    """Both models, once they are known to be equal. `at_least` so many tensors must have been in shares."""
    whole, made = build(tree), built_in_shares(tree)
    matrices = [p for p in made.parameters() if p.numel() >= shares.MIN_ELEMENTS]
    assert all(map(shares.is_stand_in, matrices))
    assert len(matrices) >= at_least
    theirs = dict(whole.named_parameters())
    assert [name for name, _ in made.named_parameters()] == list(theirs)
    for name, parameter in made.named_parameters():
        assert parameter.shape == theirs[name].shape
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert_same(name, shares.whole(parameter, torch.device("cpu")), theirs[name].detach())
    buffers = dict(whole.named_buffers())
    assert [name for name, _ in made.named_buffers()] == list(buffers)
    for name, buffer in made.named_buffers():
        assert_same(name, buffer, buffers[name])
    assert made.notices == whole.notices
    assert made.state_dict().keys() == whole.state_dict().keys()
    return whole, made


def assert_same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype, name
    assert torch.equal(ours, theirs), name


# --- weights that are made here ------------------------------------------------------------------------------------

MADE: dict[str, dict[str, Any]] = {
    "timm": {},
    "eva": {
        "vision": {
            "name": "timm_vit", "model_name": "eva_giant_patch14_clip_224", "image_size": 28, "select_layer": -2,
            "model_args": {"embed_dim": 32, "depth": 3, "num_heads": 4}, "layer_norm": True, "select_tokens": "all",
            "final_norm": False,
        },
        "projector": QFORMER,
    },
    "clip": {"vision": {"name": "hf_vision", "config": CLIP, "image_size": 48, "select_layer": -2, "final_norm": True}},
    "naflex": {"vision": VISION},
    "perceiver": {"projector": {"name": "perceiver", **PERCEIVER}},
    "c_abstractor": {"projector": {"name": "c_abstractor", **C_ABSTRACTOR, "num_positions": 16}},
    "frozen": {"freeze": ["vision", "language.*.layers.0.*"]},
    "frozen in bf16": {"freeze": ["vision"], "vision": {**VIT, "dtype": "bfloat16"}},
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_random_weights(name: str, vlm_tree: Tree) -> None:
    assert_equal(vlm_tree(**MADE[name]))


LANGUAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({"config": {**QWEN3, "tie_word_embeddings": True}}, {}),
    "lora": ({"lora": {"r": 2, "lora_alpha": 4}}, {}),
    "dora": ({"lora": {"r": 2, "use_dora": True, "init_lora_weights": "gaussian"}}, {}),
    "bf16 below lora": ({"dtype": "bfloat16", "lora": {"r": 2}}, {}),
    "experts": ({"config": {**QWEN3, "model_type": "qwen3_moe", **EXPERTS}}, {"moe": {"aux_free_rate": 0.01}}),
    "upcycled": ({}, {"moe": {"num_experts": 3}}),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_random_language_models(name: str, vlm_tree: Tree) -> None:
    options, blocks = LANGUAGES[name]
    tree = vlm_tree(**blocks)
    tree["language"] = {**tree["language"], **options}
    _, made = assert_equal(tree)
    if name == "tied":
        assert made.language.lm.lm_head.weight is made.language.lm.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("arch", SHAPES)
def test_random_qwen_vl(arch: str, tokenizer_dir: str) -> None:
    assert_equal({"arch": arch, "config": SHAPES[arch], "language": {"tokenizer": tokenizer_dir}})


# --- weights that are read -----------------------------------------------------------------------------------------


@pytest.fixture
def folders(tokenizer_dir: str, tmp_path: Path) -> dict[str, Any]:
    """Options of a language model and a tower in folders, as on the hub: the one in bf16 and several files."""
    torch.manual_seed(1)
    config = config_of_language()
    language: Any = AutoModelForCausalLM
    language.from_config(config).bfloat16().save_pretrained(tmp_path / "lm", max_shard_size="50KB")
    assert len(list((tmp_path / "lm").glob("*.safetensors"))) > 1
    tower = save(CLIP, AutoModel, tmp_path / "tower")
    return {
        "vision": {"name": "hf_vision", "path": tower, "image_size": 48, "select_layer": -2, "final_norm": True},
        "language": {"name": "hf_causal_lm", "path": str(tmp_path / "lm"), "tokenizer": tokenizer_dir},
    }


def config_of_language(**options: Any) -> Any:
    shape = {**HF_QWEN3, **options}
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def test_parts_from_folders(vlm_tree: Tree, folders: dict[str, Any]) -> None:
    assert_equal(vlm_tree(**folders))


def test_experts_from_a_folder_are_merged(vlm_tree: Tree, folders: dict[str, Any], tmp_path: Path) -> None:
    language: Any = AutoModelForCausalLM
    shape = config_of_language(model_type="qwen3_moe", **EXPERTS)
    language.from_config(shape).save_pretrained(tmp_path / "experts")
    assert_equal(vlm_tree(language={**folders["language"], "path": str(tmp_path / "experts")}))


def test_a_dense_folder_made_sparse(vlm_tree: Tree, folders: dict[str, Any]) -> None:
    assert_equal(vlm_tree(**folders, moe={"num_experts": 3, "every": 1}))


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_qwen_vl_from_a_folder(arch: str, tokenizer_dir: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    made = build({"arch": arch, "config": SHAPES[arch], "language": {"tokenizer": tokenizer_dir}})
    made.language.lm.save_pretrained(tmp_path / "vl")  # type: ignore[union-attr]
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "vl")
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "vl").num_parameters() > 0
    assert_equal({"arch": arch, "path": str(tmp_path / "vl")})


@pytest.mark.parametrize("change", ["", "lora", "moe", "finetuned"])
def test_weights_of_an_earlier_run(change: str, vlm_tree: Tree, tmp_path: Path) -> None:
    torch.manual_seed(5)
    earlier = registry.get_model_class("vlm").from_config(config_of(vlm_tree()))
    save_weights(earlier.state_dict().items(), tmp_path / "run", max_shard_bytes=30_000)
    tree = vlm_tree(pretrained=str(tmp_path / "run"))
    if change == "lora":
        tree["language"] = {**tree["language"], "lora": {"r": 2, "use_dora": True}}
    if change == "moe":
        tree["moe"] = {"num_experts": 3, "top_k": 2, "every": 1}
    if change == "finetuned":
        projector = {f"projector.{n}": torch.randn(t.shape) for n, t in earlier.projector.state_dict().items()}
        save_weights(projector.items(), tmp_path / "projector")
        tree["finetuned"] = str(tmp_path / "projector")
    whole, _ = assert_equal(tree)
    assert torch.equal(whole.vision.vit.pos_embed, earlier.vision.vit.pos_embed)  # type: ignore[union-attr]


def test_weights_of_a_tower_alone(vlm_tree: Tree, tmp_path: Path) -> None:
    from timm import create_model

    torch.manual_seed(5)
    options = {"num_classes": 0, "img_size": 48, **VIT["model_args"]}
    save_file(create_model(VIT["model_name"], **options).state_dict(), tmp_path / "vit.safetensors")  # 6 x 6 positions
    assert_equal(vlm_tree(vision={**VIT, "weights": str(tmp_path / "vit.safetensors")}))


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_lavis_and_minigpt4qwen(legacy: bool, vlm_tree: Tree, tokenizer_dir: str, tmp_path: Path) -> None:
    blip2 = {**eva_tensors(prefix="visual_encoder."), **without_text(qformer_tensors())}
    blip2 |= {**qwen_tensors(), **projection_tensors()}
    file = tmp_path / "blip2.pth"
    torch.save({"model": blip2}, file, _use_new_zipfile_serialization=not legacy)
    shape = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 400, "tie_word_embeddings": False}
    qformer = {"num_query_tokens": 5, "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 3}
    tree = vlm_tree(
        arch="minigpt4qwen",
        vision=MADE["eva"]["vision"],
        projector={"name": "qformer", **qformer, "intermediate_size": 40},
        language={"name": "hf_causal_lm", "config": shape, "tokenizer": tokenizer_dir},
        freeze=["vision", "projector.qformer", "language"],
        pretrained=str(file),
    )
    assert_equal(tree)


# --- how it is done ------------------------------------------------------------------------------------------------


def test_no_more_than_two_tensors_are_whole_at_a_time(vlm_tree: Tree, folders: dict[str, Any]) -> None:
    """Neither while weights are made nor while they are read, adapted or copied."""
    counts: list[int] = []
    hold = shares._Held.stand_in

    def counting(held: shares._Held) -> Any:
        counts.append(sum(other.whole is not None for other in shares._held.values()))
        return hold(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares._Held, "stand_in", counting)
        for blocks in ({}, folders, {"moe": {"num_experts": 3}}):
            built_in_shares(vlm_tree(**blocks))
    assert len(counts) > 60
    assert max(counts) <= 2


def test_nothing_is_left_behind(vlm_tree: Tree) -> None:
    model = built_in_shares(vlm_tree())
    assert shares._held
    del model
    gc.collect()
    assert not shares._held


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert not shares.is_active()
