from __future__ import annotations

import pytest
import torch

from lavis_ds.errors import DataError
from lavis_ds.models.splice import splice


def test_tokens_stand_at_their_places_and_nothing_else_moves() -> None:
    embeds, tokens = torch.randn(2, 5, 3), torch.randn(2, 2, 3)
    index = torch.tensor([1, 2, 5, 9])
    before = embeds.clone()
    result = splice(embeds, tokens, index)
    expected = before.view(10, 3).clone()
    expected[index] = tokens.view(4, 3)
    assert torch.equal(result, expected.view(2, 5, 3))
    assert torch.equal(embeds, before)


def test_gradients_go_to_both() -> None:
    embeds, tokens = torch.randn(1, 4, 3, requires_grad=True), torch.randn(1, 2, 3, requires_grad=True)
    splice(embeds, tokens, torch.tensor([0, 2])).sum().backward()
    assert embeds.grad is not None
    assert embeds.grad[0, :, 0].tolist() == [0, 1, 0, 1]
    assert tokens.grad is not None
    assert tokens.grad.unique().tolist() == [1]


def test_a_blank_picture_is_in_the_graph_with_weight_zero() -> None:
    embeds = torch.randn(1, 4, 3)
    tokens = torch.full((1, 2, 3), 6e4, dtype=torch.float16, requires_grad=True)  # their sum overflows float16
    result = splice(embeds.half(), tokens, torch.tensor([], dtype=torch.long))
    assert torch.equal(result, embeds.half())
    result.sum().backward()
    assert tokens.grad is not None
    assert not tokens.grad.any()


def test_mismatch_names_both_counts_and_the_samples() -> None:
    with pytest.raises(DataError, match=r"samples a, b: .* places for 3 image tokens and its pictures have 4"):
        splice(torch.randn(2, 5, 3), torch.randn(2, 2, 3), torch.tensor([0, 1, 2]), ("a", "b"))
