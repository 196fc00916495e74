from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lavis_ds.batch import Batch
from lavis_ds.config.decode import decode
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.moe.upcycle import SPARSE
from lavis_ds.models.recomputation import _Recomputed
from lavis_ds.models.skeleton import skeleton
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import save_weights

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {**SHAPE, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {**SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {
        **SHAPE,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {**SHAPE, "rms_norm_eps": 1e-5, "sliding_window": 64},
}  # fmt: skip

MOE = {"num_experts": 3, "top_k": 2}

AUTO: Any = AutoModelForCausalLM

Language = Callable[..., dict[str, Any]]


@pytest.fixture
def language(tmp_path: Path, tokenizer_dir: str) -> Language:
    """Options of a language model in a folder, as on the hub."""

    def make(family: str, **options: Any) -> dict[str, Any]:
        folder = tmp_path / family
        if not folder.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
            config = AutoConfig.for_model(family, **DENSE[family], vocab_size=len(tokenizer), eos_token_id=2)
            torch.manual_seed(1)
            AUTO.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return {"name": "hf_causal_lm", "path": str(folder), **options}

    return make


def lm_of(model: Vlm) -> Any:
    return model.language.lm


def logits(model: Vlm, batch: Batch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model.language.logits(model.hidden_states(batch).flatten(0, 1))


@pytest.mark.parametrize("family", SPARSE)
def test_logits_equal_the_dense_models(
    family: str, language: Language, make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    options = language(family)
    torch.manual_seed(0)
    dense = make_vlm(language=options)
    torch.manual_seed(0)
    sparse = make_vlm(language=language(family, gradient_checkpointing=True, experts="grouped"), moe=MOE)
    batch = make_batch(4)
    torch.testing.assert_close(logits(sparse, batch), logits(dense, batch), atol=1e-5, rtol=1e-5)  # measured 3e-6 of 5
    lm = lm_of(sparse)
    assert lm.config.model_type == SPARSE[family]
    assert lm.model.layers[0].mlp.experts.gate_up_proj.shape == (3, 96, 32)
    assert isinstance(lm.model.layers[0], _Recomputed)
    assert lm.model.layers[0].mlp.gate.weight.std() > 0.1
    tied = DENSE[family].get("tie_word_embeddings", False)
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == tied
    assert sparse.balancer is not None
    assert {p.device.type for p in sparse.parameters()} | {b.device.type for b in sparse.buffers()} == {"cpu"}
    lm.save_pretrained(tmp_path / "out")  # plain transformers reads it
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == SPARSE[family]
    again = AUTO.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = AUTO.from_pretrained(language(family)["path"], dtype=torch.float32)(ids).logits
        torch.testing.assert_close(again(ids).logits, expected, atol=1e-5, rtol=1e-5)  # measured 3e-6 of 5


def test_experts_are_separate_weights_that_train_apart(
    language: Language, make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch]
) -> None:
    model = make_vlm(language=language("qwen3"), moe=MOE)
    model(make_batch(4))[0].backward()
    experts = lm_of(model).model.layers[0].mlp.experts
    gradient = experts.down_proj.grad
    assert experts.down_proj[0].data_ptr() != experts.down_proj[1].data_ptr()
    assert (gradient[0] - gradient[1]).abs().max() > 1e-3


def test_every_second_layer(language: Language, make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch]) -> None:
    options = language("qwen2")
    torch.manual_seed(0)
    dense = make_vlm(language=options)
    torch.manual_seed(0)
    sparse = make_vlm(language=language("qwen2"), moe={**MOE, "every": 2})
    has_experts = [hasattr(layer.mlp, "experts") for layer in lm_of(sparse).model.layers]
    assert has_experts == [False, True, False, True]
    assert sparse.balancer is not None
    assert sparse.balancer.layers == (1, 3)
    batch = make_batch(4)
    torch.testing.assert_close(logits(sparse, batch), logits(dense, batch), atol=1e-5, rtol=1e-5)  # measured 3e-6 of 5


def test_weights_of_a_dense_and_of_a_sparse_run(
    language: Language, make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    """A dense run's weights become experts; a sparse run's weights are those of experts already."""
    batch = make_batch(4)
    dense = make_vlm(language=language("qwen3"))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    save_weights(dense.named_parameters(), tmp_path / "dense")
    moe = {**MOE, "aux_free_rate": 0.01}
    freeze = ["language.*.mlp.gate.weight"]
    sparse = make_vlm(language=language("qwen3"), moe=moe, pretrained=str(tmp_path / "dense"), freeze=freeze)
    torch.testing.assert_close(logits(sparse, batch), logits(dense, batch), atol=1e-5, rtol=1e-5)  # measured 3e-6 of 5
    assert any("copies of the dense layers" in line for line in sparse.notices)
    assert not any("experts" in line for line in sparse.notices if "RANDOM" in line)
    with torch.no_grad():
        for tensor in sparse.state_dict().values():
            tensor += 0.02 * torch.randn(tensor.shape)
    save_weights(sparse.state_dict().items(), tmp_path / "sparse")
    again = make_vlm(language=language("qwen3"), moe=moe, pretrained=str(tmp_path / "sparse"))
    assert again.state_dict().keys() == sparse.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, sparse.state_dict()[name]), name


def test_skeleton_has_the_same_names_and_shapes(
    language: Language, make_vlm: Callable[..., Vlm], vlm_tree: Callable[..., dict[str, Any]]
) -> None:
    options = language("qwen3")
    whole = make_vlm(language=options, moe=MOE)
    bare = skeleton(decode(VlmConfig, vlm_tree(language=options, moe=MOE)))
    assert {n: p.shape for n, p in bare.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}
    assert {p.device.type for p in bare.parameters()} == {"meta"}


def test_seed_gives_every_rank_the_same_routers(language: Language, make_vlm: Callable[..., Vlm]) -> None:
    options, made = language("llama"), []
    for _ in range(2):
        torch.manual_seed(3)
        model = make_vlm(language=options, moe=MOE)
        made.append([p for name, p in model.named_parameters() if name.endswith("gate.weight")])
    assert len(made[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("family", "change", "moe", "message"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, {}, "a gpt2 can't be made sparse.* qwen2, qwen3, llama"),
        ("llama", SHAPE, {"every": 2}, "in every layer"),
        ("llama", {**SHAPE, "mlp_bias": True}, {}, "mlp_bias"),
        ("qwen3", {**SHAPE, "attention_bias": True}, {}, None),
    ],
)
def test_what_can_not_become_sparse(
    family: str, change: Any, moe: Any, message: str | None, make_vlm: Callable[..., Vlm], tokenizer_dir: str
) -> None:
    options = {"name": "hf_causal_lm", "config": {"model_type": family, **change}, "tokenizer": tokenizer_dir}
    if message is None:
        assert make_vlm(language=options, moe={**MOE, **moe}).balancer is not None
        return
    with pytest.raises(ConfigError, match=message):
        make_vlm(language=options, moe={**MOE, **moe})


def test_the_unused_shared_expert_gets_no_gradient(
    language: Language, make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch]
) -> None:
    model = make_vlm(language=language("qwen2"), moe=MOE)
    model(make_batch(4))[0].backward()
    shared = [p for name, p in model.named_parameters() if ".shared_expert" in name]
    assert len(shared) == 4 * 4
    assert not any(p.any() for p in shared)
    assert not any(p.grad.any() for p in shared if p.grad is not None)
