"""What makes DeepSpeed faster and changes nothing that it computes; its costs are in docs/design/deepspeed-notes.md.

DeepSpeed's own functions are handed in, so that one file alone imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.models.layers import gathers_itself, repeated_layers
from lavis_ds.on_host import OnHost


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
    return _outermost(layer for layer in layers if type(layer) in kinds)


def whole_layers(module: nn.Module) -> list[nn.Module]:
    """Of a model that is not sharded, the layers whose parameters DeepSpeed may see as few, none inside another."""
    return _outermost(repeated_layers(module))


def _outermost(layers: Iterable[nn.Module]) -> list[nn.Module]:
    found = list(layers)
    inner = {module for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if layer not in inner]


def remember_parameters(modules: Iterable[nn.Module], users: Iterable[Any]) -> None:
    """Spare the host looking for parameters in all submodules each time that a layer is gathered, or all are released.

    Args:
        modules: the model, and layers that are gathered at once.
        users: DeepSpeed's modules that have an `iter_params`.
    """
    _parameters.update((module, tuple(module.parameters())) for module in modules)
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


def be_brief(settings: Mapping[str, Any], utils: Any, zero: Any, accelerator: Any) -> None:
    """Spare the host what DeepSpeed does thousands of times a step, for nothing but a profile or a message.

    Args:
        settings: of DeepSpeed.
        utils: `deepspeed.utils`; its NVTX ranges are left on where something is timed anyway.
        zero: `deepspeed.runtime.zero`.
        accelerator: DeepSpeed's.
    """
    utils.nvtx.enable_nvtx = bool(settings.get("wall_clock_breakdown"))
    modules = zero.partition_parameters, zero.partitioned_param_coordinator, zero.parameter_offload
    for module in modules:
        if not isinstance(module.print_rank_0, _Quiet):  # it asks for the rank before it looks whether to print
            module.print_rank_0 = _Quiet(module.print_rank_0)
    handle = zero.partition_parameters.NoGatherCoalescedHandle
    if not isinstance(handle.wait, _OnDevice):
        handle.wait = _OnDevice(handle.wait, accelerator)
    if accelerator.device_name() == "cuda":
        own, streams = torch.cuda.current_device(), dict[tuple[int, ...], torch.cuda.Stream]()

        def current_stream(device_index: int = own) -> torch.cuda.Stream:
            key = torch._C._cuda_getCurrentStream(device_index)  # which alone takes a tenth of the time
            if key not in streams:
                streams[key] = torch.cuda.current_stream(device_index)
            return streams[key]

        accelerator.current_stream = current_stream


class _Quiet:
    """DeepSpeed's `print_rank_0`, called only where it prints."""

    def __init__(self, print_rank_0: Callable[..., None]) -> None:
        self._print = print_rank_0

    def __call__(self, message: str, debug: bool = False, force: bool = False) -> None:
        if debug or force:
            self._print(message, debug=debug, force=force)


class _OnDevice:
    """On one rank DeepSpeed lets the host wait for weights; its streams wait for each other all the same."""

    def __init__(self, wait: Callable[..., None], accelerator: Any) -> None:
        self._wait, self._accelerator = wait, accelerator

    def __get__(self, handle: Any, _: type) -> Any:
        return self if handle is None else partial(self, handle)

    def __call__(self, handle: Any, **options: Any) -> None:
        self._accelerator.resolves_data_dependency = lambda: True
        try:
            self._wait(handle, **options)
        finally:
            del self._accelerator.resolves_data_dependency


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
    """Take a look at every gradient in ZeRO in a few kernels: by itself DeepSpeed looks at one after the other.

    With some hundred parameters that is a thousand launches a step, twice: for what is not finite, then for the norm,
    which alone tells as much (-1 where a gradient is not finite, upon which the step is left out).

    Args:
        optimizer: DeepSpeed's. Below ZeRO it stays as it is; and with offload, norms are taken as gradients arrive on
            the host.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat") and not optimizer.offload_optimizer:
        optimizer._check_overflow = lambda partition_gradients=True: None
        _keep_norm_on_host(optimizer, "_get_norm_groups")
    elif hasattr(optimizer, "single_partition_of_fp32_groups") and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None
        _keep_norm_on_host(optimizer, "scaled_global_norm")
    else:
        return

    def norm(gradients: Iterable[Tensor], _: Any, norm_type: float = 2.0) -> Tensor:
        found = [g for g in gradients if g is not None and not getattr(g, "_zero_padding", False)]
        total = torch.zeros((), device=optimizer.device)
        if found:
            total += torch.stack(torch._foreach_norm(found, norm_type, dtype=torch.float32)).pow(norm_type).sum()
        dist.all_reduce(total, group=optimizer.dp_process_group)
        total = total.pow(1 / norm_type)
        return torch.where(total.isfinite(), total, -1.0)

    optimizer.get_grad_norm_direct = norm


def _keep_norm_on_host(optimizer: Any, method: str) -> None:
    """What `method` computes, before the update: whoever asks for the norm after the step would wait for that, too."""
    compute = getattr(optimizer, method)

    def norm(*arguments: Any, **options: Any) -> Any:
        found: Any = compute(*arguments, **options)
        optimizer.norm_on_host = OnHost(found if isinstance(found, Tensor) else torch.stack(found).norm())
        return found

    setattr(optimizer, method, norm)


def scale_in_update(optimizer: Any, base: torch.optim.Optimizer) -> None:
    """Let PyTorch's fused AdamW scale gradients as it reads them, where DeepSpeed would in a pass of its own.

    Args:
        optimizer: DeepSpeed's; below ZeRO, and with offload, it stays as it is.
        base: what updates.
    """
    is_stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if type(base) is not torch.optim.AdamW or not base.defaults.get("fused"):
        return
    if not (is_stage3 or hasattr(optimizer, "single_partition_of_fp32_groups")):
        return

    def unscale_and_clip_grads(_: Any, total_norm: Tensor) -> None:
        scale = float(optimizer.loss_scale)
        divisor = None if scale == 1.0 else torch.full((), scale, device=optimizer.device)
        if optimizer.clip_grad:
            divisor = ((total_norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0).float() * scale
        base.grad_scale = divisor  # type: ignore[attr-defined]

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads
