"""AdamW for weights in 16 bits whose float32 masters live in the optimizer, in a few kernels a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_function
from torch.utils._triton import has_triton

from lavis_ds.config.schema import RunConfig
from lavis_ds.on_host import OnHost
from lavis_ds.optim.states import state_of

_CHUNK_ELEMENTS = 2**28
"""Gradients are cast to float32 so many elements at a time: 1 GiB."""


class MasterAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW; a step waits for the device nowhere, and leaves all alone where a gradient is not finite.

    A parameter without gradient takes part with zeros, as it does where gradients are sharded.

    Args:
        groups: dicts with `params`, float32, on the device where they train, once `keep_masters` is called.
        run: the `run:` block.
    """

    def __init__(self, groups: list[dict[str, Any]], run: RunConfig) -> None:
        super().__init__(groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps, fused=True)
        self._clip = run.grad_clip
        self._weights: dict[int, nn.Parameter] = {}
        self._parts: list[list[list[Tensor]]] | None = None
        self._fused: dict[int, Any] = {}
        self._norm: OnHost | None = None

    def keep_masters(self, dtype: torch.dtype) -> None:
        """Make float32 masters of the parameters' present values, and turn the parameters into `dtype`."""
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                master = parameter.detach().float()
                parameter.data = master.to(dtype)
                group["params"][index] = master
                self._weights[id(master)] = parameter

    @property
    def masters(self) -> Mapping[int, Tensor]:
        """By the id of a parameter of the model, its float32 master."""
        found = (master for group in self.param_groups for master in group["params"])
        return {id(self._weights[id(master)]): master for master in found}

    def last_norm(self) -> float:
        """Global norm of the last step's gradients before clipping. Waits for them, and not for the update."""
        return float("nan") if self._norm is None else float(self._norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update masters, and weights from them, unless a gradient is not finite; `last_norm` tells."""
        for parameter in self._weights.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms = torch._foreach_norm([_grad(parameter) for parameter in self._weights.values()], 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self._norm = OnHost(norm)
        divisor = torch.ones_like(norm) if self._clip is None else ((norm + 1e-6) / self._clip).clamp(min=1.0)
        skip = (~norm.isfinite()).float()
        for group, chunks in zip(self.param_groups, self._chunks(), strict=True):
            for masters in chunks:
                self._update(group, masters, divisor, skip)

    def _update(self, group: dict[str, Any], masters: list[Tensor], divisor: Tensor, skip: Tensor) -> None:
        weights: list[Tensor] = [self._weights[id(master)] for master in masters]
        states = [state_of(self, master) for master in masters]
        means, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        if masters[0].is_cuda and has_triton():
            torch._foreach_add_(steps, [1 - skip] * len(steps))  # a single tensor would be read on the host
            fused = self._fused_of(masters)
            fused(
                weights, [_grad(weight) for weight in weights], masters, means, squares, torch.stack(steps),
                divisor=divisor, skip=skip, lr=group["lr"], betas=group["betas"], eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
            return
        gradients = [_grad(weight).float() for weight in weights]
        adamw_function(
            masters, gradients, means, squares, [], steps,
            fused=True, grad_scale=divisor, found_inf=skip, amsgrad=False, maximize=False, lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        torch._foreach_copy_(weights, masters)

    def _chunks(self) -> list[list[list[Tensor]]]:
        """For each group, what is updated at a time: all of it where one kernel does, else some."""
        if self._parts is None:
            at_once = torch.cuda.is_available() and has_triton()
            self._parts = [
                [group["params"]] if at_once else list(_some(group["params"])) for group in self.param_groups
            ]
        return self._parts

    def _fused_of(self, masters: list[Tensor]) -> Any:
        from lavis_ds.optim.master_adamw_kernel import FusedUpdate  # needs triton

        key = id(masters[0])
        if key not in self._fused:
            self._fused[key] = FusedUpdate(masters)
        return self._fused[key]


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "the step gives zeros to those without"
    return parameter.grad


def _some(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in lists of at most `_CHUNK_ELEMENTS`, or of one."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.numel() > _CHUNK_ELEMENTS:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.numel()
    if chunk:
        yield chunk
