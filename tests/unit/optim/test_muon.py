from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError
from lavis_ds.optim.groups import param_groups
from lavis_ds.optim.muon import Muon, Piece, hidden_matrices, orthogonalised

SHAPES = [(12, 40), (40, 12), (16, 16)]


def muon(groups: list[dict[str, Any]]) -> Muon:
    return Muon(groups, lr=2e-2, betas=(0.9, 0.999), eps=1e-8, momentum=0.9)


def gradients(parameters: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in parameters]


def test_matrices_move_as_with_torchs_muon_and_the_rest_as_with_its_adamw() -> None:
    """Largest difference seen of weights after 5 steps of size 0.02 to 0.03: 0 (a step of bf16 is 1e-4)."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [*SHAPES, (7,)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = muon(
        [
            {"params": ours[:3], "weight_decay": 0.1, "uses_muon": True},
            {"params": ours[3:], "weight_decay": 0.0},
        ]
    )
    for_matrices = torch.optim.Muon(theirs[:3], lr=2e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for_vectors = torch.optim.AdamW(theirs[3:], lr=2e-2, weight_decay=0.0)
    for step in range(5):
        for parameters in (ours, theirs):
            for p, gradient in zip(parameters, gradients(parameters, step), strict=True):
                p.grad = gradient
        optimizer.step()
        for_matrices.step()  # type: ignore[no-untyped-call]
        for_vectors.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=2e-4, rtol=0)


def test_a_stack_of_matrices_is_updated_one_by_one() -> None:
    stack = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalised(stack)[1], orthogonalised(stack[1]), atol=4e-3, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalised(shape: tuple[int, int]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(update).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_flat_partition_moves_as_the_matrices_in_it() -> None:
    """One rank; matrices lie between others' elements."""
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    flat = nn.Parameter(torch.cat([torch.zeros(5), *(p.detach().flatten() for p in whole), torch.zeros(3)]))
    pieces, offset = [], 5
    for p in whole:
        pieces.append(Piece(p.shape, 0, offset, p.numel(), is_shared=False))
        offset += p.numel()
    options = {"weight_decay": 0.1, "uses_muon": True}
    first, second = muon([{"params": whole, **options}]), muon([{"params": [flat], **options}])
    second.flats = {flat: pieces}
    for step in range(3):
        found = gradients(whole, step)
        for p, gradient in zip(whole, found, strict=True):
            p.grad = gradient.clone()
        flat.grad = torch.cat([torch.zeros(5), *(g.flatten() for g in found), torch.zeros(3)])
        first.step()
        second.step()
    for p, piece in zip(whole, pieces, strict=True):
        part = flat.detach()[piece.offset : piece.offset + piece.numel].view(p.shape)
        torch.testing.assert_close(part, p.detach(), atol=0, rtol=0)
    assert flat.detach()[:5].count_nonzero() == 0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.conv = nn.Linear(4, 6), nn.Conv2d(3, 6, 2)
        self.tokens, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.ones(2, 6, 6))
        self.queries, self.head, self.last = nn.Parameter(torch.ones(1, 4, 6)), nn.Linear(6, 9), nn.Linear(6, 9)
        self.head.weight = self.tokens.weight

    def output_layers(self) -> tuple[nn.Module, ...]:
        return (self.last,)


def test_hidden_matrices() -> None:
    assert hidden_matrices(Part()) == {"hidden.weight", "experts.up"}


def run(**options: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"max_steps": 1, "batch_size_train": 1, "init_lr": 1e-3, "optimizer": {"name": "muon"}, **options}
    )


def test_groups_are_split_and_keep_their_options() -> None:
    model = Part()
    groups = {g["name"]: g for g in param_groups(model, run(param_groups={"experts": {"lr": 5e-4}}, weight_decay=0.2))}
    assert list(groups) == ["experts/muon", "default", "default/muon", "default/no_decay"]
    assert [p is model.experts.up for p in groups["experts/muon"]["params"]] == [True]
    assert (groups["experts/muon"]["lr_scale"], groups["experts/muon"]["weight_decay"]) == (0.5, 0.2)
    assert [p is model.hidden.weight for p in groups["default/muon"]["params"]] == [True]
    assert [name for name, group in groups.items() if group.get("uses_muon")] == ["experts/muon", "default/muon"]
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))


def test_nothing_for_muon_to_do() -> None:
    model = Part()
    model.hidden.requires_grad_(False)
    model.experts.requires_grad_(False)
    with pytest.raises(ConfigError, match="Muon would update nothing"):
        param_groups(model, run())
