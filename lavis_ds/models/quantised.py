"""Frozen weights in 4 bits, through bitsandbytes (QLoRA, https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lavis_ds.errors import ConfigError
from lavis_ds.models.parts import Part


def quantise(part: Part, kind: Literal["nf4", "fp4"], where: str) -> None:
    """Freeze the part and store its linear layers, output layers excepted, in 4 bits.

    They are quantised when the part comes to its device, and compute in the type of their inputs.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise ConfigError(
            f"4-bit weights need bitsandbytes ({error}).", where=where, hint="pip install 'lavis_ds[qlora]'"
        ) from error
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    left_out = part.output_layers()
    for name, module in list(part.named_modules()):
        if type(module) is not nn.Linear or module in left_out:
            continue
        layer = Linear4bit(
            module.in_features, module.out_features, module.bias is not None, quant_type=kind, device="meta"
        )
        layer.weight = Params4bit(module.weight.detach(), requires_grad=False, quant_type=kind, module=layer)
        layer.bias = module.bias
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, layer)


def is_quantised(module: nn.Module) -> bool:
    """Whether its weight is, or will be on its device, stored in 4 bits."""
    return type(getattr(module, "weight", None)).__name__ == "Params4bit"
