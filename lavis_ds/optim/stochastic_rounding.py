"""AdamW whose master weights and moments are bf16: 6 bytes a parameter instead of 12.

Rounding to the nearest bf16 would lose every update smaller than 0.2 % of its weight, and the second moment would never
shrink. Rounding up or down at random, with the probability that makes the mean right, loses nothing on average.

Source: Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_CHUNK = 1 << 26
"""Elements that are in float32 at a time."""


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW in float32 arithmetic, whose results are rounded stochastically to the type of the weights, bf16.

    The random bits depend on the number of the step and the shard alone, so that a resumed run goes on exactly, and
    ranks that hold the same weights round them alike.

    Attributes:
        shard: number of this rank's share of the weights; 0 where it has them all.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.shard = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def allocate(self, p: Tensor) -> None:
        """Give `p` its state before the first step."""
        self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure to evaluate."""
        is_seeded = False
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state.get(p):
                    self.allocate(p)
                generator = self._generator(p.device)
                if not is_seeded:
                    generator.manual_seed((self.shard << 40) + self.state[p]["step"])
                    is_seeded = True
                self._update(p, p.grad, group, generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device)
        return self._generators[device]

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        state = self.state[p]
        flats = [tensor.view(-1) for tensor in (p, state["exp_avg"], state["exp_avg_sq"])]
        for first in range(0, p.numel(), _CHUNK):
            stored = [flat[first : first + _CHUNK] for flat in flats]
            weight, average, square = (tensor.float() for tensor in stored)
            adamw(
                [weight],
                [grad.reshape(-1)[first : first + _CHUNK].float()],
                [average],
                [square],
                [],
                [torch.full((), state["step"], dtype=torch.float32, device=p.device)],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for target, source in zip(stored, (weight, average, square), strict=True):
                round_stochastically(source, target, generator)
        state["step"] += 1


def round_stochastically(source: Tensor, target: Tensor, generator: torch.Generator) -> None:
    """Write float32 `source` into bf16 `target`, up or down at random such that the mean is `source`.

    bf16 is the upper half of a float32. Adding random bits to the lower half carries into the upper one with the
    probability that the lower half stands for.
    """
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    bits = noise.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    target.copy_(bits.view(torch.float32))
