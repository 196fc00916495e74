"""On one GPU: experts in one grouped product equal the loop, in bf16 and float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lavis_ds.models.moe.grouped import NAME

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, WIDTH = 32, 8, 1024


def run(way: str, dtype: torch.dtype, tokens: int, *, skewed: bool) -> list[Tensor]:
    """Output and gradients of input, weights of experts, and weights of the choice."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=WIDTH, moe_intermediate_size=768, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = way
    experts: Any = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.03)
    experts.to("cuda", dtype)
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    if skewed:
        logits[:, :TOP_K] += 20  # all tokens to the same experts; the others get none
    weights, chosen = logits.softmax(-1).topk(TOP_K)
    weights = weights.to(dtype).requires_grad_()
    hidden = torch.randn(tokens, WIDTH, device="cuda").to(dtype).requires_grad_()
    out = experts(hidden, chosen, weights)
    out.float().sin().sum().backward()
    found = [out, hidden.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    return [tensor.detach().double() for tensor in found if tensor is not None]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("tokens", [4096, 4099, 3])
def test_grouped_equals_the_loop(tokens: int, skewed: bool) -> None:
    exact = run("eager", torch.float32, tokens, skewed=skewed)
    looped = run("eager", torch.bfloat16, tokens, skewed=skewed)
    grouped = run(NAME, torch.bfloat16, tokens, skewed=skewed)
    assert len(grouped) == len(exact) == 5
    for ours, other, reference in zip(grouped, looped, exact, strict=True):
        assert error(ours, reference) < 1.3 * error(other, reference) + 1e-3


def test_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    pairs = zip(
        run(NAME, torch.float32, 257, skewed=False), run("eager", torch.float32, 257, skewed=False), strict=True
    )
    assert max(error(*pair) for pair in pairs) < 1e-5


def test_no_sort_in_the_backward_pass() -> None:
    """The one sort is that of the choice; an index's own backward pass would sort and add."""
    run(NAME, torch.bfloat16, 4096, skewed=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(NAME, torch.bfloat16, 4096, skewed=False)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::sort", 0) == 1
    assert not any("index_put" in name for name in calls)
