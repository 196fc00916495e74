"""How many floating-point operations training takes: what packed rows are shared out by, and what MFU is made of.

Counted as is usual (https://arxiv.org/abs/2204.02311, appendix B): products with weights, scores and weighted values of
attention; forward and backward; nothing for what is recomputed, and nothing for padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.parts import LanguageModel
from lavis_ds.models.quantised import is_quantised


@dataclass(frozen=True)
class Amount:
    """What a step is made of.

    Attributes:
        tokens: real ones, of text and pictures.
        pairs: of tokens of which one sees the other.
        targets: tokens that are predicted.
        views: pictures or tiles; patches, at native resolution.
        view_pairs: of patches of the same picture, at native resolution.
    """

    tokens: float = 0.0
    pairs: float = 0.0
    targets: float = 0.0
    views: float = 0.0
    view_pairs: float = 0.0


@dataclass(frozen=True)
class Work:
    """What training costs, in FLOPs, or in tokens where a model knows no better.

    Attributes:
        per_token: of each token.
        per_pair: of each pair of tokens of which one sees the other.
        per_target: of each token that is predicted.
        per_view: of each view of a picture.
        per_view_pair: of each pair of patches of a picture.
        in_flops: whether the unit is FLOPs.
    """

    per_token: float = 1.0
    per_pair: float = 0.0
    per_target: float = 0.0
    per_view: float = 0.0
    per_view_pair: float = 0.0
    in_flops: bool = False

    def of(self, tokens: int, views: int) -> float:
        """Cost of one sample, of which every token may be predicted."""
        return self.total(Amount(tokens, tokens**2 / 2, tokens, views))

    def total(self, amount: Amount) -> float:
        """Cost of all that."""
        return (
            self.per_token * amount.tokens
            + self.per_pair * amount.pairs
            + self.per_target * amount.targets
            + self.per_view * amount.views
            + self.per_view_pair * amount.view_pairs
        )


def product_flops(module: nn.Module, *, gradient_passes: bool) -> float:
    """FLOPs of the module's products with its weights, for one input.

    2 a weight forward; backward as many for each that trains, and again for the input where a gradient passes through,
    which it does not where convolutions look at pixels.
    """
    passing = active_elements(module) - _pixel_elements(module) if gradient_passes else 0
    return 2 * (active_elements(module) + passing + active_elements(module, training=True))


def _pixel_elements(module: nn.Module) -> int:
    embeddings = (child for name, child in module.named_modules() if name.rpartition(".")[2].startswith("patch_embed"))
    return sum(matrix_elements(child) for child in embeddings)


def attention_flops(width: int, num_layers: int, *, gradient_passes: bool) -> float:
    """FLOPs of scores and weighted values, for one pair: 4 times the heads' width, and twice that backward."""
    return 4 * width * num_layers * (3 if gradient_passes else 1)


def reading(language: LanguageModel, *, gradient_passes: bool) -> dict[str, float]:
    """What a language model does for each token, pair and target, as `Work` names them."""
    heads = [product_flops(layer, gradient_passes=gradient_passes) for layer in language.output_layers()]
    return {
        "per_token": product_flops(language, gradient_passes=gradient_passes) - sum(heads),
        "per_pair": attention_flops(language.attention_width, language.num_layers, gradient_passes=gradient_passes),
        "per_target": sum(heads),
    }


def num_layers(part: nn.Module) -> int:
    """Layers of a tower."""
    return sum(1 for _ in repeated_layers(part))


def active_elements(module: nn.Module, *, training: bool = False) -> float:
    """As `matrix_elements`, but of experts only those that a token is sent to."""
    unvisited = 0.0
    for block in module.modules():
        router: Any = getattr(block, "gate", None)
        if hasattr(block, "experts") and hasattr(router, "top_k"):
            share = 1 - router.top_k / router.num_experts
            unvisited += share * matrix_elements(block.experts, training=training)  # type: ignore[arg-type]
    return matrix_elements(module, training=training) - unvisited


def matrix_elements(module: nn.Module, *, training: bool = False) -> int:
    """Elements of the module's matrices, those of embeddings left out, which no product reads as a whole.

    Args:
        module: what they are in; weights in 4 bits count as what they stand for.
        training: count those that train alone.
    """
    found = 0
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            continue
        if is_quantised(child):
            found += 0 if training else int(child.in_features) * int(child.out_features)  # type: ignore[arg-type]
            continue
        for parameter in child.parameters(recurse=False):
            if parameter.dim() > 1 and (parameter.requires_grad or not training):
                found += parameter.numel()
    return found
