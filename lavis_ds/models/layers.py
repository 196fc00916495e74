"""The layers that occur many times in a model, and compiling them.

Between matrix products a layer is bound by memory: norms, rotary positions and activations, run one by one, read and
write each tensor several times. A compiled layer does it once. One graph serves all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._triton import has_triton
from transformers.modeling_layers import GradientCheckpointingLayer

from lavis_ds.models.quantised import is_quantised

_LARGE = 300e6
"""Parameters. Compiling takes some 20 seconds, in which a smaller model takes a hundred steps and more."""


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers of decoders and towers of transformers and timm, outermost first."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) or _is_timm_block(module):
            yield module


def _is_timm_block(module: nn.Module) -> bool:
    return type(module).__module__.startswith("timm.models") and type(module).__name__.endswith("Block")


def compile_layers(model: nn.Module) -> int:
    """Have them compiled when they are first called. Returns how many layers that is."""
    return sum(_compile(layer) for layer in repeated_layers(model))


def would_not_pay(model: nn.Module) -> str | None:
    """Why compiled layers can't be had here, or would not win back the time they take; None where they do."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if not has_triton():
        return "triton is not installed"
    size = sum(parameter.numel() for parameter in model.parameters())
    return None if size >= _LARGE else f"the model is small ({size / 1e6:.0f} M parameters)"


def gathers_itself(layer: nn.Module) -> bool:
    """Whether something inside gathers sharded weights by itself, and lets go of them: PEFT's DoRA does."""
    return any(len(getattr(module, "lora_magnitude_vector", ())) > 0 for module in layer.modules())


def _compile(layer: nn.Module) -> bool:
    """Compile the layer, or of one with experts the attention: which expert sees how many tokens is known too late."""
    if gathers_itself(layer) or any(is_quantised(module) for module in layer.modules()):
        return False  # PEFT and bitsandbytes look at these weights in Python
    has_experts = any(hasattr(module, "experts") for module in layer.modules())
    chosen = getattr(layer, "self_attn", None) if has_experts else layer
    if not isinstance(chosen, nn.Module):
        return False
    chosen.forward = torch.compile(chosen.forward)  # not the whole call, in which engines' hooks would be compiled too
    return True
