"""Parameters of a model that was built in shares become ZeRO-3's, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds import distributed, shares
from lavis_ds.engines.ds_bundles import Bundles


def partition(
    module: nn.Module, bundles: Bundles, init: Callable[..., object], settings: Mapping[str, Any], device: torch.device
) -> dict[str, tuple[int, Tensor]]:
    """Hand a model in shares to ZeRO-3. One parameter is whole at a time, on the device.

    A model that every rank holds whole is left to `deepspeed.initialize`.

    Args:
        module: the model; afterwards it is on the device, its parameters in the format that they compute in.
        bundles: of its parameters.
        init: `deepspeed.zero.Init`; DeepSpeed has its process group by now.
        settings: what `deepspeed.initialize` will get.
        device: this rank's.

    Returns:
        Of what trains in bundles, by name: this rank's stretch, in the format that it is cast from.
    """
    parameters: list[tuple[str, Any]] = list(module.named_parameters())
    if not any(_is_in_shares(parameter, bundles) for _, parameter in parameters):
        return {}
    dtype, found = _format(settings), dict[str, tuple[int, Tensor]]()
    _, first = parameters[0]
    for name, parameter in parameters:
        if (bundle := bundles.of(parameter)) is not None and bundle.is_in_shares():
            whole = bundle.filled(device)
            if parameter.requires_grad:
                found |= bundles.stretches(name, parameter, *_own_stretch(whole))
        else:
            whole = shares.whole(parameter, device)
        parameter.data = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
        if parameter is first:
            init(module=nn.ParameterList([first]), config_dict_or_path=dict(settings))
        else:
            first.convert_to_zero_parameters([parameter])  # what `initialize` does with parameters that it finds whole
    module.to(device)  # buffers; DeepSpeed moves no model that has such parameters
    return found


def _is_in_shares(parameter: nn.Parameter, bundles: Bundles) -> bool:
    bundle = bundles.of(parameter)
    return shares.is_stand_in(parameter) if bundle is None else bundle.is_in_shares()


def _own_stretch(whole: Tensor) -> tuple[int, Tensor]:
    """What ZeRO-3 gives this rank of a flat tensor: number of the first element, and elements, on the host."""
    size = math.ceil(len(whole) / distributed.world_size())
    start = distributed.global_rank() * size
    return start, whole[start : start + size].cpu()


def _format(settings: Mapping[str, Any]) -> torch.dtype | None:
    """What DeepSpeed would cast every parameter to; None where each keeps its own."""
    formats = (("bf16", torch.bfloat16), ("fp16", torch.float16))
    return next((dtype for key, dtype in formats if (settings.get(key) or {}).get("enabled")), None)
