"""Tensors in shares: what is done to a stand-in is done to what it stands in for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lavis_ds import shares

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Embedding(100, 64, padding_idx=3), nn.Linear(64, 128))


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: shares.whole(p, CPU) for name, p in module.named_parameters()}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    found = whole(ours)
    for name, parameter in theirs.named_parameters():
        assert found[name].dtype == parameter.dtype
        assert torch.equal(found[name], parameter), name


def changed(made: nn.Sequential) -> nn.Sequential:
    """In ways that libraries do it."""
    first, table, last = made
    nn.init.trunc_normal_(last.weight, std=0.02)
    nn.init.orthogonal_(first.weight)
    first.weight.data.mul_(3)
    table.weight.data[5].normal_()
    with torch.no_grad():
        first.weight.copy_(last.weight[:64])
        last.weight[64:] = first.weight
    made.append(copy.deepcopy(last).to(torch.bfloat16))
    made.append(nn.Linear(64, 64, bias=False))
    made[-1].weight = first.weight
    made[-1].register_parameter("other", nn.Parameter(first.weight.detach()[1:40] @ last.weight.T))
    return made


def test_whatever_is_done_gives_the_same_numbers_and_random_state() -> None:
    theirs, their_next = changed(layers()), torch.rand(3)
    with shares.building():
        ours = changed(layers())
    assert torch.equal(torch.rand(3), their_next)
    assert_equal(ours, theirs)
    assert ours[-1].weight is ours[0].weight
    assert [shares.is_stand_in(p) for p in ours.parameters()] == [p.numel() >= 1024 for p in theirs.parameters()]


def test_stand_ins_look_like_the_tensors_and_take_no_memory() -> None:
    with shares.building():
        made = nn.Linear(1024, 2048)
    assert made.weight.shape == (2048, 1024)
    assert made.weight.dtype == torch.float32
    assert made.weight.requires_grad
    assert made.weight.untyped_storage().nbytes() == 8
    assert made.weight.isnan().all()  # outside nobody can mistake it for weights
    assert not shares.is_stand_in(made.bias.new_zeros(4096))


def test_a_view_that_is_used_later_is_not_lost() -> None:
    with shares.building():
        made = layers()
        row = made[0].weight.data[7]
        for other in (made[1].weight, made[2].weight):
            other.data.fill_(1.0)
        row.fill_(5.0)
    assert whole(made)["0.weight"][7].unique().tolist() == [5.0]


def test_values_that_are_set_in_place_of_others_are_kept() -> None:
    new = torch.randn(64, 64)
    with shares.building():
        made = layers()
        made[0].weight.data = new
        made[2].load_state_dict({"weight": torch.ones(128, 64), "bias": torch.ones(128)}, assign=True)
    assert torch.equal(whole(made)["0.weight"], new)
    assert whole(made)["2.weight"].unique().tolist() == [1.0]


def test_shares_of_three_ranks_make_up_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 does not divide the 4,100 elements, so the last share is padded."""
    values, found = torch.randn(41, 100), []
    monkeypatch.setattr("lavis_ds.distributed.world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr("lavis_ds.distributed.global_rank", lambda rank=rank: rank)
        with shares.building():
            made = nn.Embedding(41, 100)
            made.load_state_dict({"weight": values})
        held = shares._held_of(made.weight)
        assert held is not None
        assert held.share is not None
        found.append(held.share)
    assert [len(share) for share in found] == [1367] * 3
    assert torch.equal(torch.cat(found)[:4100].view(41, 100), values)
    assert torch.cat(found)[4100:].tolist() == [0.0]


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), shares.building():
        _ = layers()[0].weight.data.fill_(1 // 0)
    assert not shares.is_active()
    assert not any(shares.is_stand_in(p) for p in layers().parameters())
