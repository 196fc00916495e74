"""What keeps experts evenly loaded: the balance loss of Switch Transformers, the z-loss of ST-MoE, as plain functions.

Shape suffixes: S positions (B * T), E experts, L layers with experts, A experts a token is sent to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """What a router did in one forward pass.

    Attributes:
        logits: (S, E), with gradient.
        experts: (S, A) int64, the experts chosen.
    """

    logits: Tensor
    experts: Tensor


class RoutingSums(NamedTuple):
    """Sums over the real tokens of one micro-batch, float32.

    Attributes:
        counts: (L, E), how many chose each expert; without gradient.
        probs: (L, E), the router's probabilities (softmax over all experts).
        z: (L,), squared log-sum-exp of the logits (ST-MoE, https://arxiv.org/abs/2202.08906, equation 5).
        tokens: (), their number.
    """

    counts: Tensor
    probs: Tensor
    z: Tensor
    tokens: Tensor


def routing_sums(choices: Sequence[Choice], mask_S: Tensor) -> RoutingSums:
    """Sums over the positions where `mask_S` is True: padding and empty rows are left out."""
    real_S1 = mask_S[:, None].float()
    counts, probs, z = [], [], []
    for logits_SE, experts_SA in choices:
        logits_SE = logits_SE.float()
        probs.append((logits_SE.softmax(-1) * real_S1).sum(0))
        z.append((logits_SE.logsumexp(-1).square() * real_S1[:, 0]).sum())
        ones_SA = real_S1.expand(experts_SA.shape)
        counts.append(torch.zeros_like(probs[-1]).detach().scatter_add(0, experts_SA.flatten(), ones_SA.flatten()))
    return RoutingSums(torch.stack(counts), torch.stack(probs), torch.stack(z), real_S1.sum())


def balance_loss(load_LE: Tensor, prob_LE: Tensor, over: Literal["layer", "model"] = "layer") -> Tensor:
    """E * sum over experts of load times probability; A where experts are chosen evenly, and larger where not.

    Args:
        load_LE: share of the tokens that chose each expert; rows add up to A. A constant: no gradient comes from it.
        prob_LE: mean probability of each expert; rows add up to 1.
        over: `layer`: the mean over layers of each layer's loss; `model`: the loss of the means over layers, as in
            `transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func`. There an expert that is full in one
            layer is made up for by its namesake that is empty in another.

    Source: Switch Transformers, equations 4-6 (https://arxiv.org/abs/2101.03961), for A > 1 as in transformers.
    """
    if over == "model":
        load_LE, prob_LE = load_LE.mean(0, keepdim=True), prob_LE.mean(0, keepdim=True)
    return load_LE.shape[-1] * (load_LE * prob_LE).sum(-1).mean()
