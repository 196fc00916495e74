"""The loss made in chunks is that of whole logits, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.models.language.output_layer import OutputLayer
from lavis_ds.models.loss import TargetLosses, target_losses

K, D, V = 23, 16, 61


def layer(chunk_targets: int = 5, *, bias: bool = False) -> OutputLayer:
    torch.manual_seed(0)
    made = nn.Linear(D, V, bias=bias)
    OutputLayer.of(made, chunk_bytes=chunk_targets * 10 * V)
    assert isinstance(made, OutputLayer)
    return made


def targets() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, V, (K,), generator=generator)
    labels[[3, 11]] = IGNORE_INDEX
    hidden = torch.randn(K, D, generator=generator)
    return hidden.requires_grad_(), labels, torch.rand(K, generator=generator)


def results(head: OutputLayer, *, whole: bool, weighted: bool, scale: float = 1.0) -> tuple[TargetLosses, list[Tensor]]:
    hidden, labels, weights = targets()
    factors = weights if weighted else None
    if whole:
        found = target_losses(nn.functional.linear(hidden, head.weight, head.bias), labels, factors)
    else:
        found = TargetLosses(*head(hidden, labels=labels, weights=factors))
    head.zero_grad()
    (found.total * scale).backward()
    return found, [p.grad.clone() for p in (hidden, *head.parameters()) if p.grad is not None]


@pytest.mark.parametrize("chunk_targets", [1, 5, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_are_those_of_whole_logits(chunk_targets: int, bias: bool, weighted: bool) -> None:
    head = layer(chunk_targets, bias=bias)
    ours, our_gradients = results(head, whole=False, weighted=weighted, scale=0.37)
    theirs, their_gradients = results(head, whole=True, weighted=weighted, scale=0.37)
    torch.testing.assert_close(ours.total, theirs.total, atol=1e-5, rtol=1e-6)  # measured 8e-6 of 110
    torch.testing.assert_close(ours.each, theirs.each, atol=1e-6, rtol=1e-6)  # measured 5e-7
    assert torch.equal(ours.right, theirs.right)
    assert len(our_gradients) == len(their_gradients) == 2 + bias
    for a, b in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)  # measured 1e-7
    assert not ours.each.requires_grad


def test_no_more_logits_than_fit_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    linear = nn.functional.linear
    monkeypatch.setattr(
        "lavis_ds.models.language.output_layer.F.linear", lambda *a: shapes.append(len(a[0])) or linear(*a)
    )
    results(layer(5), whole=False, weighted=False)
    assert shapes == [5, 5, 5, 5, 3]


def test_what_does_not_train_gets_no_gradient() -> None:
    head = layer()
    head.requires_grad_(False)
    _, gradients = results(head, whole=False, weighted=True)
    assert [tuple(g.shape) for g in gradients] == [(K, D)]
    hidden, labels, _ = targets()
    with torch.no_grad():
        total, *_ = layer()(hidden, labels=labels)
    assert not total.requires_grad


def test_targets_that_are_none_give_exactly_nothing() -> None:
    head, labels = layer(), torch.full((K,), IGNORE_INDEX)
    hidden = torch.randn(K, D, requires_grad=True)
    total, each, right = head(hidden, labels=labels)
    total.backward()
    assert total == 0
    assert not each.any()
    assert not right.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_second_backward_pass_is_refused() -> None:
    head = layer()
    hidden, labels, _ = targets()
    total, *_ = head(hidden, labels=labels)
    total.backward(retain_graph=True)
    with pytest.raises(TypeError):
        total.backward()


def test_bf16_and_autocast_are_near_float32() -> None:
    head = layer()
    hidden, labels, weights = targets()
    exact, exact_gradients = results(head, whole=True, weighted=True)
    with torch.autocast("cpu", torch.bfloat16):
        total, *_ = head(hidden, labels=labels, weights=weights)
    head.zero_grad()
    total.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, exact.total, rtol=2e-3, atol=0)  # measured 2e-4
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert (hidden.grad.dtype, head.weight.grad.dtype) == (torch.float32, torch.float32)
    for ours, theirs in zip((hidden.grad, head.weight.grad), exact_gradients, strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()  # measured 3e-3


def test_it_is_a_linear_layer_otherwise() -> None:
    head = layer()
    hidden = torch.randn(2, 3, D)
    assert torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
    assert list(head.state_dict()) == ["weight"]
    other = nn.Sequential()
    OutputLayer.of(other, 1)
    assert type(other) is nn.Sequential
