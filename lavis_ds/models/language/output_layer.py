"""The output layer and the loss in one: logits exist for a few targets at a time, and never as a whole.

A vocabulary of 150,000 makes the logits of 8,000 targets 5 GB in float32, and their gradient as much again. Here each
chunk's logits become losses and gradients at once, as in Liger Kernel (https://arxiv.org/abs/2410.10989).

Shape suffixes: K targets, D the language model's width, V ids, C targets of a chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._triton import has_triton

from lavis_ds.batch import IGNORE_INDEX

_BYTES_AN_ELEMENT, _FUSED_BYTES = 10, 4
"""Of logits and their gradient in 16 bits, and in float32 between them where kernels are not fused."""


class OutputLayer(nn.Linear):
    """A linear layer that also gives losses. Its weights, names and forward pass are those of `nn.Linear`.

    The loss is made inside a call of this module, because under ZeRO-3 its weight exists only then.

    Attributes:
        chunk_bytes: memory for logits and what is made of them.
    """

    chunk_bytes: int

    @classmethod
    def of(cls, layer: nn.Module, chunk_bytes: int) -> None:
        """Turn a plain linear layer into one of these, in place."""
        if type(layer) is nn.Linear:
            layer.__class__ = cls
        if isinstance(layer, cls):
            layer.chunk_bytes = chunk_bytes

    def forward(  # type: ignore[override]
        self, input: Tensor, labels: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Logits; with `labels` (K,) the `TargetLosses` of hidden states (K, D), each times its `weights` (K,)."""
        if labels is None:
            return super().forward(input)
        an_element = _FUSED_BYTES if _is_fused(input) else _BYTES_AN_ELEMENT
        size = max(1, self.chunk_bytes // (an_element * self.out_features))
        found: tuple[Tensor, ...] = _Losses.apply(
            input, self.weight, self.bias, labels, weights, size, torch.is_grad_enabled()
        )
        return found


class _Losses(torch.autograd.Function):
    """Sum of weighted losses, and without gradient: each of them, and whether the best guess is right."""

    @staticmethod
    def forward(
        context: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_K: Tensor,
        weights_K: Tensor | None,
        size: int,
        needs_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        context.dtypes = [None if t is None else t.dtype for t in (hidden_KD, weight_VD, bias_V)]
        hidden_KD, weight_VD, bias_V = _cast(hidden_KD, weight_VD, bias_V)
        needs_hidden, needs_weight, needs_bias = (needs_gradients and n for n in context.needs_input_grad[:3])
        grad_hidden_KD = torch.empty_like(hidden_KD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        losses_K = hidden_KD.new_empty(len(labels_K), dtype=torch.float32)
        right_K = torch.empty_like(labels_K, dtype=torch.bool)
        losses = _fused_losses() if _is_fused(hidden_KD) else _losses
        for start in range(0, len(labels_K), size):
            chunk = slice(start, start + size)
            hidden_CD, labels_C = hidden_KD[chunk], labels_K[chunk]
            logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
            right_K[chunk] = logits_CV.argmax(-1) == labels_C  # an ignored label is never an argmax
            factors_C = labels_C.ne(IGNORE_INDEX).float()
            if weights_K is not None:
                factors_C = factors_C * weights_K[chunk]
            losses_K[chunk], grad_CV = losses(logits_CV, labels_C, factors_C, needs_gradients)
            if grad_hidden_KD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_KD[chunk])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.T, hidden_CD)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0, dtype=torch.float32)
        context.gradients = grad_hidden_KD, grad_weight_VD, grad_bias_V
        context.mark_non_differentiable(losses_K, right_K)
        return losses_K.sum(), losses_K, right_K

    @staticmethod
    def backward(context: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(context.gradients, context.dtypes, strict=True)
        hidden, weight, bias = (None if found is None else _scaled(found, grad, dtype) for found, dtype in pairs)
        context.gradients = None  # they may be scaled in place, so a second pass would be wrong
        return hidden, weight, bias, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total` (float32) plus their product, which CUDA does not round to 16 bits before."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, torch.float32, out=total)
    else:
        total += left @ right


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Times `factor`, and in `dtype`, in one pass."""
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _losses(logits_CV: Tensor, labels_C: Tensor, factors_C: Tensor, needs_gradients: bool) -> tuple[Tensor, Tensor]:
    """Weighted losses (C,), and their gradient with respect to the logits, in the logits' type."""
    scores_CV = logits_CV.float()
    labels_C1 = labels_C.clamp(min=0)[:, None]
    total_C1 = scores_CV.logsumexp(-1, keepdim=True)
    losses_C = (total_C1 - scores_CV.gather(1, labels_C1))[:, 0] * factors_C
    if not needs_gradients:
        return losses_C, logits_CV
    is_label_CV = torch.arange(scores_CV.shape[1], device=labels_C.device) == labels_C1
    grad_CV = ((scores_CV - total_C1).exp() - is_label_CV.float()) * factors_C[:, None]
    return losses_C, grad_CV.to(logits_CV.dtype)


def _is_fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()


@cache
def _fused_losses() -> Any:
    """`_losses` as two kernels, which read the logits twice and write their gradient once."""
    return torch.compile(_losses, dynamic=True)


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast has it for a linear layer."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
