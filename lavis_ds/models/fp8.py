"""Matrix products of large linear layers in 8 bits, by torchao. Weights keep their own format and their names.

Source: https://github.com/pytorch/ao/tree/main/torchao/float8
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn

from lavis_ds.errors import ConfigError
from lavis_ds.models.parts import Part
from lavis_ds.models.skeleton import reads_weights

_SMALLEST = 1024
"""Width of a layer from which on 8 bits are faster, casts of inputs, weights and gradients included."""

_MULTIPLE = 16
"""Of which the kernels want every width to be."""

_CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def use_fp8(part: Part, recipe: Literal["tensorwise", "rowwise"], where: str, *, emulate: bool = False) -> str:
    """Let the part's large linear layers multiply in 8 bits. Output layers and experts are left as they are.

    Args:
        part: with its adapters, which are left as they are, too.
        recipe: a scale for each tensor (fastest), or for each row (more exact).
        where: of the option in the configuration.
        emulate: round as in 8 bits, but multiply in the layers' own format; runs anywhere, slowly.

    Returns:
        What was done, in a line.

    Raises:
        ConfigError: torchao is missing, the GPU can't, or no layer is large enough.
    """
    if reads_weights() and not emulate:
        _check_gpu(recipe, where)
    left_out = part.output_layers()
    linears = [m for m in part.modules() if type(m) is nn.Linear and m not in left_out]
    chosen = {m for m in linears if _suits(m)}
    if not chosen:
        sizes = ", ".join(sorted({f"{m.in_features} x {m.out_features}" for m in linears})[:6])
        raise ConfigError(
            f"this part has no linear layer for 8 bits ({sizes or 'it has none at all'}).",
            where=where,
            given=recipe,
            expected=f"widths from {_SMALLEST} on that are multiples of {_MULTIPLE}",
            hint="Set it to none.",
        )
    _convert(part, chosen, recipe, where, emulate)
    others = len(linears) - len(chosen)
    rest = f"; {others} others are too small, or no multiple of {_MULTIPLE} wide" if others else ""
    return f"{recipe} in {len(chosen)} linear layers{rest}"


def _suits(layer: nn.Linear) -> bool:
    sizes = (layer.in_features, layer.out_features)
    return min(sizes) >= _SMALLEST and all(size % _MULTIPLE == 0 for size in sizes)


def _check_gpu(recipe: str, where: str) -> None:
    needed = _CAPABILITIES[recipe]
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.hip is None else None
    if found is None or found < needed:
        raise ConfigError(
            f"{recipe} products in 8 bits need an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} or newer.",
            where=where,
            given=f"{found[0]}.{found[1]}" if found else "no such GPU",
            hint="Set it to none.",
        )


def _convert(part: Part, chosen: set[nn.Linear], recipe: str, where: str, emulate: bool) -> None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"products in 8 bits need torchao ({error}).", where=where, hint="pip install 'lavis_ds[fp8]'"
        ) from error
    # Tokens are padded to a multiple of 16 in the products of gradients, where they are the inner width.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)
    convert_to_float8_training(part, config=config, module_filter_fn=lambda module, _: module in chosen)
