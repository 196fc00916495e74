"""Muon for the hidden layers' matrices and AdamW for all else, on whole parameters and on ZeRO's flat partitions.

Muon orthogonalises the averaged gradient of a matrix, for which it needs the matrix whole. ZeRO cuts a group's
parameters into flat partitions at any place, so matrices that several ranks hold are put together for a moment, each
on one rank. Momentum stays where the partition is.

Sources: https://kellerjordan.github.io/posts/muon/ (algorithm and coefficients, as in `torch.optim.Muon`) and
https://arxiv.org/abs/2502.16982 (the factor of the step that lets Muon share AdamW's learning rate and weight decay).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lavis_ds import distributed

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_NOT_HIDDEN = ("embed", "lm_head")


@runtime_checkable
class HasOutputLayers(Protocol):
    """A part of a model that knows which of its layers give logits."""

    def output_layers(self) -> tuple[nn.Module, ...]:
        """The layers."""
        ...


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that Muon is made for: matrices of linear layers, and stacks of them (experts).

    Embeddings (patches and positions too), output layers, convolutions and vectors are not among them.
    """
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for module in model.modules():
        if isinstance(module, HasOutputLayers):
            outer |= {id(p) for layer in module.output_layers() for p in layer.parameters()}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return frozenset(
        name
        for name, p in model.named_parameters()
        if id(p) not in outer
        and not any(word in name for word in _NOT_HIDDEN)
        and (id(p) in linear or (p.ndim == 3 and "experts" in name))
    )


def orthogonalised(update: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: singular values between 0.7 and 1.2, in bf16.

    Args:
        update: (rows, columns), or (N, rows, columns) for a stack of matrices.
    """
    a, b, c = _COEFFICIENTS
    x_NAB = update.bfloat16().reshape(-1, *update.shape[-2:])
    is_tall = x_NAB.shape[-2] > x_NAB.shape[-1]
    x_NAB = x_NAB.mT if is_tall else x_NAB
    x_NAB = x_NAB / x_NAB.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram_NAA = x_NAB @ x_NAB.mT
        x_NAB = torch.baddbmm(x_NAB, torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c), x_NAB, beta=a)
    return (x_NAB.mT if is_tall else x_NAB).reshape(update.shape)


@dataclass(frozen=True)
class Piece:
    """What a rank's flat partition holds of a matrix.

    Attributes:
        shape: of the whole matrix, or stack of matrices.
        start: first element held, in the flattened matrix.
        offset: its place in the flat partition.
        numel: elements held; 0 where none is.
        is_shared: several ranks hold pieces; all ranks know of the matrix then, in the same order.
    """

    shape: torch.Size
    start: int
    offset: int
    numel: int
    is_shared: bool


class Muon(torch.optim.AdamW):
    """Updates groups marked `uses_muon` by Muon, the others by fused AdamW.

    Attributes:
        flats: ZeRO's flat partition -> the matrices in it; every rank has the same shared ones in the same order.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, momentum: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.momentum = momentum
        self.flats: Mapping[Tensor, Sequence[Piece]] = {}

    def is_by_muon(self, held: Tensor) -> bool:
        """Whether this tensor, a parameter or a flat partition of ZeRO, is updated by Muon."""
        groups = (group["params"] for group in self.param_groups if group.get("uses_muon"))
        return held in self.flats or any(held is p for params in groups for p in params)

    def allocate(self, held: Tensor) -> None:
        """Give what Muon updates its state before the first step."""
        self.state[held] = {"step": 0, "momentum_buffer": torch.zeros_like(held)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure to evaluate."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("uses_muon")]
        super().step()
        self.param_groups = groups
        for group in groups:
            for p in group["params"] if group.get("uses_muon") else ():
                if p.grad is not None:
                    self._update(p, group["lr"], group["weight_decay"])

    def _update(self, p: Tensor, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        if not self.state.get(p):
            self.allocate(p)
        self.state[p]["step"] += 1
        average = self.state[p]["momentum_buffer"]
        average.lerp_(p.grad, 1 - self.momentum)
        update = p.grad.lerp_(average, self.momentum)  # Nesterov's; in place, since gradients end with the step
        p.mul_(1 - lr * weight_decay)
        if p.ndim > 1:
            _add(p, orthogonalised(update), lr, p.shape)
            return
        pieces = self.flats[p]
        for piece in pieces:
            if not piece.is_shared:
                found = orthogonalised(_part(update, piece).view(piece.shape))
                _add(_part(p, piece), found.reshape(-1), lr, piece.shape)
        _update_shared(p, update, [piece for piece in pieces if piece.is_shared], lr)


def _update_shared(p: Tensor, update: Tensor, pieces: Sequence[Piece], lr: float) -> None:
    """Matrices that several ranks hold, as many at a time as there are ranks: each rank does one."""
    size, rank = distributed.world_size(), distributed.global_rank()
    for first in range(0, len(pieces), size):
        batch = list(enumerate(pieces[first : first + size]))
        wholes = [torch.zeros(piece.shape.numel(), dtype=torch.bfloat16, device=p.device) for _, piece in batch]
        for owner, piece in batch:
            wholes[owner][piece.start : piece.start + piece.numel] = _part(update, piece)
        # Each element comes from one rank, all others add zeros to it: the sum is exact.
        _wait([dist.reduce(wholes[owner], owner, async_op=True) for owner, _ in batch])
        if rank < len(batch):
            wholes[rank].copy_(orthogonalised(wholes[rank].view(batch[rank][1].shape)).reshape(-1))
        _wait([dist.broadcast(wholes[owner], owner, async_op=True) for owner, _ in batch])
        for owner, piece in batch:
            _add(_part(p, piece), wholes[owner][piece.start : piece.start + piece.numel], lr, piece.shape)


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.offset : piece.offset + piece.numel]


def _add(p: Tensor, update: Tensor, lr: float, shape: torch.Size) -> None:
    p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(shape[-2:])))
