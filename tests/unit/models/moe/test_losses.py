from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lavis_ds.models.moe.losses import Choice, balance_loss, routing_sums

L, E, A, ROWS, LENGTH = 3, 6, 2, 2, 7


def choices(generator: torch.Generator) -> list[Choice]:
    made = []
    for _ in range(L):
        logits = (torch.randn(ROWS * LENGTH, E, generator=generator) * 2).requires_grad_()
        made.append(Choice(logits, logits.softmax(-1).topk(A).indices))
    return made


MASK = torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [4]])


def loss(made: list[Choice], over: Literal["layer", "model"]) -> torch.Tensor:
    sums = routing_sums(made, MASK.flatten())
    return balance_loss(sums.counts / sums.tokens, sums.probs / sums.tokens, over)


def switch(*logits: torch.Tensor) -> Any:
    reference: Any = load_balancing_loss_func
    return reference(logits, E, A, MASK.long())


def test_over_the_model_equals_transformers() -> None:
    made = choices(torch.Generator().manual_seed(0))
    ours = loss(made, "model")
    theirs = switch(*(c.logits for c in made))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)  # measured 0
    ours_by_layer = torch.autograd.grad(ours, [c.logits for c in made])
    theirs_by_layer = torch.autograd.grad(theirs, [c.logits for c in made])
    for a, b in zip(ours_by_layer, theirs_by_layer, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)  # measured 6e-9


def test_over_layers_is_the_mean_of_each_layers_switch_loss() -> None:
    made = choices(torch.Generator().manual_seed(1))
    by_layer = [switch(c.logits.detach()).item() for c in made]
    assert loss(made, "layer").item() == pytest.approx(sum(by_layer) / L, abs=1e-6)  # measured 8e-8
    assert loss(made, "layer").item() != pytest.approx(loss(made, "model").item(), abs=1e-3)


def test_is_switchs_formula_for_one_expert_a_token() -> None:
    """E * sum_i f_i P_i, written out token by token."""
    logits = torch.randn(9, E, generator=torch.Generator().manual_seed(2))
    sums = routing_sums([Choice(logits, logits.argmax(-1, keepdim=True))], torch.ones(9, dtype=torch.bool))
    share = [sum(int(row.argmax()) == i for row in logits) / 9 for i in range(E)]
    prob = [sum(float(row.softmax(0)[i]) for row in logits) / 9 for i in range(E)]
    expected = E * sum(f * p for f, p in zip(share, prob, strict=True))
    ours = balance_loss(sums.counts / sums.tokens, sums.probs / sums.tokens)
    assert ours.item() == pytest.approx(expected, abs=1e-6)  # measured 6e-8


def test_z_loss() -> None:
    made = choices(torch.Generator().manual_seed(3))
    sums = routing_sums(made, MASK.flatten())
    expected = torch.stack([c.logits[MASK.flatten()].exp().sum(-1).log().square().sum() for c in made])
    torch.testing.assert_close(sums.z, expected, atol=1e-5, rtol=1e-6)  # measured 2e-5 of 135


def test_padding_has_no_part_and_gets_no_gradient() -> None:
    made = choices(torch.Generator().manual_seed(4))
    before = loss(made, "layer")
    gradient = torch.autograd.grad(before, made[0].logits)[0].view(ROWS, LENGTH, E)
    assert not gradient[~MASK].any()
    assert gradient[MASK].any()
    moved = [Choice(c.logits.detach().clone(), c.experts.clone()) for c in made]
    for c in moved:
        c.logits[~MASK.flatten()] = 50.0
        c.experts[~MASK.flatten()] = 0
    assert loss(moved, "layer").item() == pytest.approx(before.item(), abs=0)


def test_nothing_real_gives_zeros() -> None:
    sums = routing_sums(choices(torch.Generator().manual_seed(5)), torch.zeros(ROWS * LENGTH, dtype=torch.bool))
    assert not sums.counts.any()
    assert not sums.probs.any()
    assert sums.tokens == 0
