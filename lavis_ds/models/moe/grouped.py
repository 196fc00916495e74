"""Experts whose products are one grouped product: tokens sorted by expert, multiplied, and brought together again.

As transformers' `grouped_mm`, whose products these are, but for what moves memory. Autograd's backward pass of an index
sorts and adds row by row; here either direction is a gather, since it is known where each row goes. Weights are applied
before the second product, whose input is narrower than its result. On a GPU the rest is fused.

Shape suffixes: S tokens, A experts a token is sent to, G = S * A, D width, F inner width, E experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._triton import has_triton
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, _grouped_linear
from transformers.integrations.moe import grouped_mm_experts_forward as of_transformers

NAME = "lavis_ds_grouped"
"""In transformers."""


def grouped_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the chosen experts make of each token (S, D), weighted and added up.

    Args:
        self: transformers' module with the weights of all experts.
        hidden_states: (S, D).
        top_k_index: (S, A), the chosen experts.
        top_k_weights: (S, A).
    """
    unusual = (getattr(self, name, False) for name in ("has_bias", "has_post_expert_norm", "_is_expert_parallel"))
    if not self.has_gate or any(unusual):
        made: Tensor = of_transformers(self, hidden_states, top_k_index, top_k_weights)
        return made
    experts_G, order_G = top_k_index.flatten().sort()
    place_G = torch.empty_like(order_G).scatter_(0, order_G, torch.arange(len(order_G), device=order_G.device))
    ends_E = torch.searchsorted(experts_G, torch.arange(self.num_experts, device=order_G.device), right=True).int()
    rows_GD = _Sorted.apply(hidden_states, order_G, place_G)
    weights_G1 = _Sorted.apply(top_k_weights.reshape(-1, 1), order_G, place_G)
    inner_GF = _product(self, rows_GD, self.gate_up_proj, ends_E)
    inner_GF = _weighted(self, inner_GF, weights_G1)
    out_GD = _product(self, inner_GF, self.down_proj, ends_E)
    out_SD: Tensor = _Summed.apply(out_GD, order_G, place_G, len(hidden_states))
    return out_SD.to(hidden_states.dtype)


class _Sorted(torch.autograd.Function):
    """Each token's row, once for each of its experts, in the order of experts."""

    @staticmethod
    def forward(context: Any, rows_SD: Tensor, order_G: Tensor, place_G: Tensor) -> Tensor:
        context.save_for_backward(place_G)
        context.num_rows = len(rows_SD)
        return _spread(rows_SD, order_G)

    @staticmethod
    def backward(context: Any, grad_GD: Tensor) -> tuple[Tensor, None, None]:
        (place_G,) = context.saved_tensors
        return _summed(grad_GD, place_G, context.num_rows), None, None


class _Summed(torch.autograd.Function):
    """The sum of each token's rows, which stand in the order of experts."""

    @staticmethod
    def forward(context: Any, rows_GD: Tensor, order_G: Tensor, place_G: Tensor, num_rows: int) -> Tensor:
        context.save_for_backward(order_G)
        return _summed(rows_GD, place_G, num_rows)

    @staticmethod
    def backward(context: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        (order_G,) = context.saved_tensors
        return _spread(grad_SD, order_G), None, None, None


def _product(experts: Any, rows_GX: Tensor, weights_EXY: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its weights; autocast, which knows linear layers only, is done by hand."""
    kind = rows_GX.device.type
    if torch.is_autocast_enabled(kind):
        weights_EXY = weights_EXY.to(torch.get_autocast_dtype(kind))
    made: Tensor = _grouped_linear(rows_GX, weights_EXY, ends_E, is_transposed=experts.is_transposed)
    return made


def _spread(rows_SD: Tensor, order_G: Tensor) -> Tensor:
    return rows_SD[order_G // max(1, len(order_G) // max(1, len(rows_SD)))]


def _summed(rows_GD: Tensor, place_G: Tensor, num_rows: int) -> Tensor:
    return (_fused(_sum_of_rows) if _fuses(rows_GD) else _sum_of_rows)(rows_GD, place_G, num_rows)


def _sum_of_rows(rows_GD: Tensor, place_G: Tensor, num_rows: int) -> Tensor:
    return rows_GD[place_G].view(num_rows, -1, rows_GD.shape[-1]).sum(1)


def _weighted(experts: Any, inner_GF: Tensor, weights_G1: Tensor) -> Tensor:
    is_silu = isinstance(experts.act_fn, (nn.SiLU, SiLUActivation))
    if is_silu and type(experts)._apply_gate is _default_apply_gate:
        return (_fused(_weighted_silu) if _fuses(inner_GF) else _weighted_silu)(inner_GF, weights_G1)
    made: Tensor = experts._apply_gate(inner_GF) * weights_G1.to(inner_GF.dtype)
    return made


def _weighted_silu(inner_GF: Tensor, weights_G1: Tensor) -> Tensor:
    gate, up = inner_GF.chunk(2, dim=-1)
    return functional.silu(gate) * up * weights_G1.to(up.dtype)


def _fuses(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton() and not torch.compiler.is_compiling()


@cache
def _fused(function: Any) -> Any:
    """`function` as one kernel for any number of rows."""
    return torch.compile(function, dynamic=True)


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
