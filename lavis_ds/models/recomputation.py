"""Activations of layers: kept for the backward pass, computed again in it, or waiting for it in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import LayersConfig

_KEPT = (
    "aten.mm", "aten.addmm", "aten._scaled_mm", "aten._grouped_mm", "transformers.grouped_mm_fallback",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._flash_attention_forward", "flash_attn._flash_attn_varlen_forward", "flash_attn_3.fwd",
    "flash_attn_3._flash_attn_forward",
)  # fmt: skip
"""Operators that `selective` does not run twice: linear layers, experts, and attention kernels that build no scores."""

_HOST = "cpu"


def recompute(layers: Iterable[nn.Module], options: LayersConfig, where: str) -> None:
    """Turn layers, in place, into such that treat their activations as `options` say. Their names stay.

    They do so whenever gradients are recorded, in training mode or not: the gradient passes through frozen layers too.

    Args:
        layers: in order; their first argument is the hidden states.
        options: of the part.
        where: of the part in the configuration.

    Raises:
        ConfigError: there are no layers.
    """
    way = options.gradient_checkpointing
    if way == "none":
        return
    layers = list(layers)
    if not layers:
        raise ConfigError(
            "this part has no layers whose activations could be recomputed.",
            where=f"{where}.gradient_checkpointing",
            given=way,
            expected="none",
        )
    every = int(way.removeprefix("every_")) if way.startswith("every_") else 1
    selection = {"context_fn": partial(create_selective_checkpoint_contexts, _kept())} if way == "selective" else {}
    kinds = (_OnHost, _Recomputed) if options.offload_activations else (_Recomputed,)
    for layer in layers[::every]:
        put_before(layer, *kinds).checkpoint_options = {"use_reentrant": False, **selection}


def put_before(module: Any, *kinds: type[nn.Module]) -> Any:
    """`module` itself, which is of `kinds` now and, behind them, of its own class. That names it still."""
    classes: Any = (*kinds, type(module))
    module.__class__ = _joined(*classes)
    return module


@cache
def _joined(*kinds: Any) -> type[nn.Module]:
    """One class for all layers of a kind, so that one compiled graph serves them all."""
    own = kinds[-1]
    return type(own.__name__, kinds, {"__module__": own.__module__, "__qualname__": own.__qualname__})


class _Recomputed(nn.Module):
    """Goes before a layer's own class.

    The choice stands in `forward`, inside what `layer.compile()` compiles: the compiler then sees what is to be kept.
    """

    checkpoint_options: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, **self.checkpoint_options, **kwargs)


class _OnHost(nn.Module):
    """Goes before `_Recomputed`. Stands in `__call__`, outside of what is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with _on_host((*args, *kwargs.values())):
            return super().__call__(*args, **kwargs)


def _on_host(values: Iterable[Any]) -> saved_tensors_hooks:
    """Context in which those of `values` that need a gradient are saved in pinned host memory, if they are on a GPU.

    What all layers share, such as rotary angles, needs none, and stays where it is.
    """
    chosen = {v.data_ptr() for v in values if isinstance(v, Tensor) and v.requires_grad and v.device.type != _HOST}
    host = save_on_cpu(pin_memory=True)

    def pack(tensor: Tensor) -> Any:
        return host.pack_hook(tensor) if tensor.data_ptr() in chosen else tensor

    def unpack(packed: Any) -> Tensor:
        found: Tensor = host.unpack_hook(packed) if isinstance(packed, tuple) else packed
        return found

    return saved_tensors_hooks(pack, unpack)


def _kept() -> list[Any]:
    """The operators of `_KEPT` that exist here, and FlexAttention."""
    packets = (getattr(getattr(torch.ops, space), name, None) for space, name in (k.split(".") for k in _KEPT))
    return [packet.default for packet in packets if packet is not None] + [torch.ops.higher_order.flex_attention]
