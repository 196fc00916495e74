"""Building a model of which no rank ever holds the whole, with the weights that it would have otherwise, bit by bit.

Every rank runs the same code from the same seed. A large tensor is whole while something is done to it; then each rank
keeps its share of the elements, and the module holds a stand-in: a tensor of the same shape and type that takes no
memory. An operation that gets a stand-in is given the whole tensor in its place. So any code that builds a model or
reads weights does so in shares, without knowing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lavis_ds import distributed
from lavis_ds.host_memory import returning_freed_memory

MIN_ELEMENTS = 1024
"""Smaller tensors stay whole: cutting them up would save nothing."""

_aten = torch.ops.aten
_PASSED_ON = {_aten.detach.default, _aten.alias.default}
"""What these give of a stand-in is one too."""

_OVERWRITES = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
}
"""What the first argument held before does not matter to these, so it is not gathered for them."""

_COPIES = {_aten._to_copy.default, _aten.clone.default}
"""Element by element, so each rank makes its share of the result."""

_held: dict[int, _Held] = {}
"""By the address of the stand-in's memory."""

_active: list[_Build] = []


@contextmanager
def building() -> Iterator[None]:
    """Models built inside are in shares, on the CPU. All ranks must run the same code on the same numbers."""
    build = _Build()
    hook = register_module_parameter_registration_hook(build.register)
    _active.append(build)
    try:
        with build, returning_freed_memory():
            yield
    finally:
        _active.remove(build)
        hook.remove()
        build.close(at_last=True)


def is_active() -> bool:
    """Whether models made now are in shares."""
    return bool(_active)


def is_stand_in(tensor: Tensor) -> bool:
    """Whether it stands in for a tensor that each rank has a share of."""
    return _held_of(tensor) is not None


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor itself, or what it stands in for, on `device`. Called on all ranks, in the same order."""
    held = _held_of(tensor)
    return tensor.detach().to(device) if held is None else held.gathered(device)


def stretch(tensor: Tensor) -> tuple[int, Tensor]:
    """What this rank has of a tensor's elements: the number of the first one, and they, flat. ZeRO-3 cuts alike."""
    held = _held_of(tensor)
    if held is None or held.share is None:
        return 0, (tensor.detach() if held is None or held.whole is None else held.whole).flatten()
    start = distributed.global_rank() * len(held.share)
    return start, held.share[: max(0, held.shape.numel() - start)]


class _Box(np.ndarray):
    """The memory of a stand-in. It ends with the last tensor that uses it."""


class _Held:
    """What a stand-in stands for.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        whole: the tensor, while something is done to it.
        share: otherwise: this rank's stretch of its elements; all ranks' have the same length.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, whole: Tensor | None, share: Tensor | None) -> None:
        self.shape, self.dtype, self.whole, self.share = shape, dtype, whole, share

    def stand_in(self) -> Tensor:
        """A tensor of this shape and type, of NaN where nobody should look."""
        box = np.full(8, 0xFF, np.uint8).view(_Box)
        tensor = torch.from_numpy(box).view(self.dtype)[:1].expand(self.shape)
        address = tensor.untyped_storage().data_ptr()
        _held[address] = self
        weakref.finalize(box, _held.pop, address).atexit = False
        return tensor

    def gathered(self, device: torch.device) -> Tensor:
        """The whole tensor, from all ranks' shares."""
        if self.share is None:
            assert self.whole is not None
            return self.whole.to(device)
        return distributed.gather_pieces(self.share, device)[: self.shape.numel()].view(self.shape)

    def cut(self, tensor: Tensor) -> None:
        """Keep this rank's share of `tensor`; of a mapped file, no more than that is read."""
        size = math.ceil(self.shape.numel() / distributed.world_size())
        own = tensor.expand(self.shape).reshape(-1)[distributed.global_rank() * size :][:size]
        self.share = torch.zeros(size, dtype=self.dtype)
        self.share[: len(own)].copy_(own)
        self.whole = None

    def is_in_use(self) -> bool:
        """Whether someone holds a view of the whole tensor, through which it may still be changed."""
        if self.whole is None:
            return False
        return torch._C._storage_Use_Count(self.whole.untyped_storage()._cdata) > 2  # the tensor's and this storage's


class _Build(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See `building`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[_Held] = []

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """A module gets a parameter. It is left whole until the next one comes, since its first values come first."""
        if parameter is not None and _is_large(parameter) and not is_stand_in(parameter):
            parameter.data = self._hold(parameter.detach())

    def close(self, but: Sequence[_Held] = (), *, at_last: bool = False) -> None:
        """Cut up the tensors that are whole, but for some, and (until the end) for those that are in use."""
        opened, self._open = [held for held in self._open if held.whole is not None], []
        for held in opened:
            if any(held is other for other in but) or (held.is_in_use() and not at_last):
                self._open.append(held)
            elif held.whole is not None:
                held.cut(held.whole)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        found = [(tensor, held) for tensor in tensors if (held := _held_of(tensor)) is not None]
        if not found or func in _PASSED_ON:
            return func(*args, **kwargs)
        first, held = found[0]
        if func in _COPIES and kwargs.get("device") in (None, torch.device("cpu")):
            return self._copied(held, kwargs.get("dtype") or held.dtype)
        if func is _aten.copy_.default and len(found) == 1 and first is args[0] and not held.is_in_use():
            held.cut(args[1])
            return first
        return self._on_wholes(func, args, kwargs, found)

    def _on_wholes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Sequence[tuple[Tensor, _Held]]
    ) -> Any:
        self.close(but=[held for _, held in found])
        for tensor, held in found:
            if held.whole is None:
                new = func in _OVERWRITES and tensor is args[0]
                held.whole = torch.empty(held.shape, dtype=held.dtype) if new else held.gathered(torch.device("cpu"))
                held.share = None
                self._open.append(held)
        wholes = {id(tensor): held.whole for tensor, held in found}
        stand_ins = {id(held.whole): tensor for tensor, held in found}
        args, kwargs = tree_map(lambda value: wholes.get(id(value), value), (args, dict(kwargs)))
        return tree_map(lambda value: stand_ins.get(id(value), value), func(*args, **kwargs))

    def _hold(self, tensor: Tensor) -> Tensor:
        self.close()
        held = _Held(tensor.shape, tensor.dtype, tensor, None)
        self._open.append(held)
        return held.stand_in()

    def _copied(self, held: _Held, dtype: torch.dtype) -> Tensor:
        if held.share is None:
            assert held.whole is not None
            return self._hold(held.whole.to(dtype, copy=True))
        return _Held(held.shape, dtype, None, held.share.to(dtype, copy=True)).stand_in()


def _is_large(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() >= MIN_ELEMENTS
        and tensor.is_contiguous()
    )


def _held_of(tensor: Tensor) -> _Held | None:
    if not _held or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    return _held.get(tensor.untyped_storage().data_ptr())
