"""What makes DeepSpeed faster and changes nothing that it computes; its costs are in docs/design/deepspeed-notes.md.

DeepSpeed's own functions are handed in, so that one file alone imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.models.layers import gathers_itself, repeated_layers
from lavis_ds.optim.on_host import OnHost


def gather_by_layer(module: nn.Module, zero: dict[str, Any], set_leaves: Callable[..., Any]) -> list[nn.Module]:
    """Let ZeRO-3 gather a layer's weights at once, and leave what is inside to itself.

    Hooks on each submodule take the host longer than a fast GPU takes for the layer, and none can be compiled.

    Args:
        module: the model, before it is sharded.
        zero: the block `zero_optimization`, which gets a default.
        set_leaves: `deepspeed.utils.set_z3_leaf_modules`.

    Returns:
        These layers, none inside another.
    """
    layers = list(repeated_layers(module))
    kinds = {type(layer) for layer in layers} - {type(layer) for layer in layers if gathers_itself(layer)}
    if kinds:
        set_leaves(module, list(kinds))
    for layer in layers:
        if any(parameter.requires_grad for parameter in layer.parameters()):
            layer.register_forward_pre_hook(_ask_for_gradient)
    zero.setdefault("memory_efficient_linear", False)  # for weights that go within a layer; it can't be compiled
    found = [layer for layer in layers if type(layer) in kinds]
    inner = {module for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if layer not in inner]


def remember_parameters(layers: Iterable[nn.Module], users: Iterable[Any]) -> None:
    """Spare the host looking for a layer's parameters, in all its submodules, each time that it is gathered.

    Args:
        layers: those that are gathered at once.
        users: DeepSpeed's modules that have an `iter_params`.
    """
    _parameters.update((layer, tuple(layer.parameters())) for layer in layers)
    for user in users:
        if not isinstance(user.iter_params, _Remembering):
            user.iter_params = _Remembering(user.iter_params)


_parameters: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]] = WeakKeyDictionary()


class _Remembering:
    """DeepSpeed's `iter_params`, without the search where its result is known."""

    def __init__(self, search: Callable[[nn.Module, bool], Iterable[nn.Parameter]]) -> None:
        self._search = search

    def __call__(self, module: Any, recurse: bool = False) -> Iterable[nn.Parameter]:
        known = _parameters.get(module) if recurse else None
        if known is None:
            return self._search(module, recurse)
        return chain(known, (parameter for _, parameter in module.ds_external_parameters()))


def can_bundle(run: RunConfig, zero: Mapping[str, Any]) -> bool:
    """Whether it makes no difference which elements are in one parameter: to the optimizer, and to compression."""
    looks_at_parameters = run.optimizer.name != "adamw" or run.optimizer.stochastic_rounding
    quantised = zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients")
    on_disk = (zero.get("offload_param") or {}).get("device") == "nvme"
    return not (looks_at_parameters or quantised or on_disk)


def be_brief(settings: Mapping[str, Any], utils: Any, accelerator: Any) -> None:
    """Spare the host what DeepSpeed does thousands of times a step, for nothing but a profile or a message.

    Args:
        settings: of DeepSpeed.
        utils: `deepspeed.utils`; its NVTX ranges are left on where something is timed anyway.
        accelerator: DeepSpeed's.
    """
    utils.nvtx.enable_nvtx = bool(settings.get("wall_clock_breakdown"))
    if accelerator.device_name() == "cuda":
        own = torch.cuda.current_device()  # which current_stream() would find out anew, and slowly
        accelerator.current_stream = lambda device_index=own: torch.cuda.current_stream(device_index)


def _ask_for_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the input of a layer whose weights are gathered at once have a gradient, though nothing before it trains.

    Else DeepSpeed's hook on the layer runs when the backward pass comes to it, and not when it has left it, and finds
    no gradients: adapters in a first layer, behind frozen embeddings.
    """
    first, *others = inputs
    if not torch.is_grad_enabled() or any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        return None
    return first.detach().requires_grad_(), *others  # hidden states, in all layers of transformers and timm


def look_at_gradients_together(optimizer: Any) -> None:
    """Take a look at every gradient in ZeRO-1 and 2 in a few kernels: by itself DeepSpeed looks at one after the other.

    With some hundred parameters that is a thousand launches a step, twice: for what is not finite, then for the norm,
    which alone tells as much (-1 where a gradient is not finite, upon which the step is left out).

    Args:
        optimizer: DeepSpeed's. Those of other stages stay as they are; and with offload, norms are taken as gradients
            arrive on the host.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return

    def norm(gradients: Iterable[Tensor], _: Any, norm_type: float = 2.0) -> Tensor:
        found = [g for g in gradients if g is not None and not getattr(g, "_zero_padding", False)]
        total = torch.zeros((), device=optimizer.device)
        if found:
            total += torch.stack(torch._foreach_norm(found, norm_type, dtype=torch.float32)).pow(norm_type).sum()
        dist.all_reduce(total, group=optimizer.dp_process_group)
        total = total.pow(1 / norm_type)
        return torch.where(total.isfinite(), total, -1.0)

    of_all_groups = optimizer.scaled_global_norm

    def scaled_global_norm(*arguments: Any, **options: Any) -> Tensor:
        found: Tensor = of_all_groups(*arguments, **options)
        optimizer.norm_on_host = OnHost(found)  # the step's end would wait for the update
        return found

    optimizer.get_grad_norm_direct = norm
    optimizer.scaled_global_norm = scaled_global_norm
    optimizer.check_overflow = lambda partition_gradients=True: None
