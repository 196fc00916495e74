"""A plugin of the benchmarks: random weights are one block of numbers again and again.

Drawing billions of numbers would take minutes, and speed and memory do not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIZE = 2**20
_GENERATOR = torch.Generator().manual_seed(0)
NORMAL, UNIFORM = torch.randn(SIZE, generator=_GENERATOR), torch.rand(SIZE, generator=_GENERATOR)
_normal, _uniform = Tensor.normal_, Tensor.uniform_


def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    return _normal(self, mean, std, **options) if self.numel() < SIZE else _filled(self, NORMAL * std + mean)


def uniform_(self: Tensor, a: float = 0.0, b: float = 1.0, **options: Any) -> Tensor:
    return _uniform(self, a, b, **options) if self.numel() < SIZE else _filled(self, UNIFORM * (b - a) + a)


def _filled(tensor: Tensor, block: Tensor) -> Tensor:
    whole = block.repeat(-(-tensor.numel() // SIZE))[: tensor.numel()].view(tensor.shape)
    with torch.no_grad():
        return tensor.copy_(whole)


Tensor.normal_, Tensor.uniform_ = normal_, uniform_  # type: ignore[method-assign, assignment]
