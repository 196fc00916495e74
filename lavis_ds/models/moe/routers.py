"""Which modules of a language model are routers, and choosing experts with a bias.

Shape suffixes: S positions, E experts, A experts a token is sent to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds.errors import ConfigError

SUPPORTED = {
    "MixtralTopKRouter": "mixtral",
    "OlmoeTopKRouter": "olmoe",
    "Qwen2MoeTopKRouter": "qwen2_moe",
    "Qwen3MoeTopKRouter": "qwen3_moe",
    "Qwen3VLMoeTextTopKRouter": "qwen3_vl_moe",
}
"""Class of transformers -> family. All give (logits, weights, experts): the largest of a softmax, as they are or adding
up to 1."""


def find_routers(language: nn.Module) -> dict[str, nn.Module]:
    """Name -> router, in the order of layers; only those of a supported kind."""
    return {name: module for name, module in language.named_modules() if type(module).__name__ in SUPPORTED}


def require_routers(language: nn.Module, routers: dict[str, nn.Module], where: str) -> None:
    """Raises:
    ConfigError: there are none, or they are of a kind that is not supported.
    """
    if routers:
        return
    unknown = _unknown_kind(language)
    raise ConfigError(
        f"routers of this kind ({unknown}) are not supported." if unknown else "the language model has no experts.",
        where=where,
        expected=f"one of {', '.join(SUPPORTED.values())}, or a dense model and model.moe.num_experts",
        hint=f"Without {where} it trains as it is.",
    )


def _unknown_kind(language: nn.Module) -> str | None:
    """Class of what looks like a router or experts of another kind."""
    names = (type(module).__name__ for module in language.modules())
    return next((name for name in names if "Router" in name or "Experts" in name or "MoE" in name), None)


def choose(router: Any, logits_SE: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Experts (S, A) with the largest probability plus bias, and their weights (S, A), which the bias does not enter.

    Source: Auxiliary-Loss-Free Load Balancing (https://arxiv.org/abs/2408.15664), equation 3.
    """
    probs_SE = logits_SE.float().softmax(-1)
    experts_SA = torch.topk(probs_SE.detach() + bias_E, int(router.top_k), dim=-1).indices
    weights_SA = probs_SE.gather(-1, experts_SA)
    if getattr(router, "norm_topk_prob", True):
        weights_SA = weights_SA / weights_SA.sum(-1, keepdim=True)
    return weights_SA, experts_SA
