"""Compiling the layers that repeat: which they are, how many graphs they take, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoConfig, AutoModelForCausalLM

from lavis_ds.models import layers
from lavis_ds.models.layers import compile_layers, gathers_itself, repeated_layers, would_not_pay

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip


def decoder(model_type: str = "qwen3", **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model


def passes(model: Any, lengths: list[int]) -> list[Tensor]:
    """Hidden states and gradients for rows of these lengths."""
    found: list[Tensor] = []
    for length in lengths:
        torch.manual_seed(length)
        embeds = torch.randn(1, length, 32, requires_grad=True)
        hidden = model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        hidden.sin().sum().backward()
        assert embeds.grad is not None
        found += [hidden.detach(), embeds.grad]
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that are compiled; by a backend that needs no compiler."""
    found: list[Any] = []

    plain = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))

    def backend(graph: Any, example: Any) -> Any:
        found.append(graph)
        return plain(graph, example)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=backend))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield found
    torch.compiler.reset()


def test_layers_of_decoders_and_towers_repeat() -> None:
    tower = timm.create_model("vit_tiny_patch16_224", depth=2)
    model = nn.ModuleDict({"language": decoder(), "vision": tower})
    assert [type(layer).__name__ for layer in repeated_layers(model)] == ["Qwen3DecoderLayer"] * 3 + ["Block"] * 2


def test_one_graph_serves_all_layers_of_any_length(graphs: list[Any]) -> None:
    expected = passes(decoder(), [8, 12, 20, 9])
    model = decoder()
    assert compile_layers(model) == 3
    found = passes(model, [8, 12, 20, 9])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # measured 0
    assert len(graphs) == 2  # for the first length, then for any
    assert not torch._dynamo.utils.counters["graph_break"]


def test_generation_runs_what_is_not_compiled(graphs: list[Any]) -> None:
    from lavis_ds.models.language.hf_causal_lm import HFCausalLM

    language = HFCausalLM.__new__(HFCausalLM)
    nn.Module.__init__(language)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SHAPE, eos_token_id=63)
    language.lm, language.tokenizer = AutoModelForCausalLM.from_config(config), SimpleNamespace(pad_token_id=63)
    compile_layers(language)
    ids = language.generate(torch.randn(1, 5, 32), torch.ones(1, 5, dtype=torch.long), max_new_tokens=3)
    assert ids.shape == (1, 3)
    assert not graphs


def test_hooks_of_a_layer_stay_outside(graphs: list[Any]) -> None:
    """ZeRO-3 gathers a layer's weights in such a hook."""
    model, seen = decoder(), []
    compile_layers(model)
    for layer in repeated_layers(model):
        layer.register_forward_pre_hook(lambda module, _: seen.append(module))
    passes(model, [8])
    assert len(seen) == 3
    assert not torch._dynamo.utils.counters["graph_break"]


def test_of_layers_with_experts_the_attention_is_compiled() -> None:
    model = decoder("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    assert compile_layers(model) == 3
    for layer in repeated_layers(model):
        assert "forward" in vars(layer.self_attn)
        assert "forward" not in vars(layer)


def test_weights_that_are_looked_at_in_python_are_left_alone() -> None:
    model = decoder()
    model.layers[0].mlp.up_proj.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})
    model.layers[1].mlp.up_proj.weight = type("Params4bit", (nn.Parameter,), {})(model.layers[1].mlp.up_proj.weight)
    assert gathers_itself(model.layers[0])
    assert compile_layers(model) == 1


def test_auto_compiles_what_wins_the_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small = nn.Linear(10, 10)
    assert would_not_pay(small) == "there is no GPU"
    monkeypatch.setattr(layers, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(layers, "has_triton", lambda: True)
    assert would_not_pay(small) == "the model is small (0 M parameters)"
    with torch.device("meta"):
        assert would_not_pay(nn.Linear(20_000, 20_000)) is None
    monkeypatch.setattr(layers, "has_triton", lambda: False)
    assert would_not_pay(small) == "triton is not installed"
