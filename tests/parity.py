"""How far a part or family is from its reference: checked against what is promised, and recorded for the docs.

`scripts/benchmarks/parity.py` makes the table of docs/design/parity.md from what is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
"""Largest relative error in float32."""

PROPERTY = "parity"
"""Name under which errors stand in pytest's JUnit file."""


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the reference's; over 1e-3 where the reference is smaller than that."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return float((ours.detach() - reference.detach()).norm() / reference.detach().norm().clamp(min=1e-3))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def gradient_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest of all parameters; the names must be the same."""
    assert ours.keys() == reference.keys(), sorted(ours.keys() ^ reference.keys())[:5]
    return max(relative_error(ours[name], reference[name]) for name in reference)


def input_gradients(output: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Gradients of all parameters by a fixed random direction of the output.

    A mean, as losses are: bias of keys, whose gradient is zero but for rounding, then stays far below 1e-3.
    """
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(output.shape, generator=generator)
    module.zero_grad()
    (output * direction).mean().backward()
    return gradients(module)


class Parity:
    """Checks and records errors.

    Args:
        record: pytest's `record_property`.
    """

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def __call__(self, what: str, reference: str, **errors: float) -> None:
        """Args:
        what: part or family.
        reference: class it is compared with.
        errors: of `forward`, `loss`, `gradient`, as far as compared.
        """
        self._record(PROPERTY, json.dumps({"what": what, "reference": reference, **errors}))
        assert errors
        for name, value in errors.items():
            assert value < TOLERANCE, (what, name, value)
