"""Qwen3-VL with experts: the balance loss of transformers, with three rows of positions and pictures among the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from lavis_ds.errors import ConfigError
from lavis_ds.models.qwen_vl import QwenVL
from tests.unit.models.test_qwen_vl import SHAPES, Pair, build, save

ARCH = "qwen3_vl_moe"


def test_loss_and_gradient_equal_transformers(tokenizer_dir: str, tmp_path: Path) -> None:
    folder = save(ARCH, SHAPES[ARCH], tokenizer_dir, tmp_path / "model")
    both = Pair(ARCH, folder)
    batch = both.batch([[both.encode([3, "wide", 6], 0)], [both.encode([4], 1)]])
    moe = {"balance_loss": 0.5, "balance_over": "model"}
    model = build(ARCH, path=folder, moe=moe).train()
    plain = build(ARCH, path=folder).train()
    model(batch)[0].backward()
    alone = plain(batch)[0]
    alone.backward(retain_graph=True)
    without = router_gradients(plain)

    logits: list[torch.Tensor] = []
    for module in plain.modules():
        if type(module).__name__ == "Qwen3VLMoeTextTopKRouter":
            module.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    plain.zero_grad()
    plain(batch)
    text = plain.language.decoder.config
    mask = batch.attention_mask.long()
    reference: Any = load_balancing_loss_func
    expected = reference(tuple(logits), text.num_experts, text.num_experts_per_tok, mask)
    (0.5 * batch.target_weight * expected).backward()
    assert model.balancer is not None
    load = model.balancer.finish_step()
    assert load is not None
    assert load.balance_loss == pytest.approx(expected.item(), abs=1e-6)  # measured 0
    assert load.counts.sum() == len(logits) * text.num_experts_per_tok * batch.num_tokens
    for both_, token, balance in zip(router_gradients(model), without, router_gradients(plain), strict=True):
        torch.testing.assert_close(both_ - token, balance, atol=1e-5, rtol=1e-4)  # measured 2e-7
        assert balance.any()


def router_gradients(model: QwenVL) -> list[torch.Tensor]:
    found = [(name, p.grad) for name, p in model.named_parameters() if name.endswith(".gate.weight")]
    assert found
    return [gradient.clone() for _, gradient in found if gradient is not None]


def test_grouped_experts_equal_the_loop(tokenizer_dir: str, tmp_path: Path) -> None:
    folder = save(ARCH, SHAPES[ARCH], tokenizer_dir, tmp_path / "model")
    both = Pair(ARCH, folder)
    batch = both.batch([[both.encode([3, "wide", 6], 0)]])
    models = [build(ARCH, path=folder, language={"experts": way}).train() for way in ("grouped", "eager")]
    assert [model.describe()["experts"] for model in models] == ["grouped_mm", "eager"]
    losses = [model(batch)[0] for model in models]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)  # measured 0
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-5, msg=name)  # measured 6e-8


def test_dense_qwen_vl_has_nothing_to_balance(tokenizer_dir: str) -> None:
    language = {"tokenizer": tokenizer_dir}
    with pytest.raises(ConfigError, match="has no experts"):
        build("qwen3_vl", config=SHAPES["qwen3_vl"], language=language, moe={"balance_loss": 0.1})
    with pytest.raises(ConfigError, match="can't be made sparse"):
        build("qwen3_vl", config=SHAPES["qwen3_vl"], language=language, moe={"num_experts": 4})
