"""Parameters of a model that was built in shares become ZeRO-3's, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lavis_ds import shares


def partition(
    module: nn.Module, init: Callable[..., object], settings: Mapping[str, Any], device: torch.device
) -> None:
    """Hand a model in shares to ZeRO-3. One parameter is whole at a time, on the device.

    A model that every rank holds whole is left to `deepspeed.initialize`.

    Args:
        module: the model; afterwards it is on the device, its parameters in the format that they compute in.
        init: `deepspeed.zero.Init`; DeepSpeed has its process group by now.
        settings: what `deepspeed.initialize` will get.
        device: this rank's.
    """
    parameters = list(module.parameters())
    if not any(map(shares.is_stand_in, parameters)):
        return
    first: Any = parameters[0]
    dtype = _format(settings)
    _make_whole(first, device, dtype)
    init(module=nn.ParameterList([first]), config_dict_or_path=dict(settings))
    for parameter in parameters[1:]:
        _make_whole(parameter, device, dtype)
        first.convert_to_zero_parameters([parameter])  # what `initialize` does with parameters that it finds whole
    module.to(device)  # buffers; DeepSpeed moves no model that has such parameters


def _make_whole(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> None:
    whole = shares.whole(parameter, device)
    parameter.data = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole


def _format(settings: Mapping[str, Any]) -> torch.dtype | None:
    """What DeepSpeed would cast every parameter to; None where each keeps its own."""
    formats = (("bf16", torch.bfloat16), ("fp16", torch.float16))
    return next((dtype for key, dtype in formats if (settings.get(key) or {}).get("enabled")), None)
