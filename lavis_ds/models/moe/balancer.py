"""Watches the routers of a language model: balance loss, z-loss, the bias that replaces them, and load.

Shape suffixes: L layers with experts, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.models.moe.configs import MoEConfig
from lavis_ds.models.moe.load import Load
from lavis_ds.models.moe.losses import Choice, RoutingSums, balance_loss, routing_sums
from lavis_ds.models.moe.routers import choose


class Balancer(nn.Module):
    """What a model with experts does beside predicting tokens. It has no parameters.

    A hook on each router notes what it did, in the forward pass only: the second run of a layer whose activations are
    recomputed happens in the backward pass, where nothing is noted. The losses are computed from these notes outside
    the layers, so recomputation repeats nothing of them.

    Args:
        routers: name -> router, in the order of layers.
        options: coefficients and method.
        coefficient: of the balance loss.

    Attributes:
        coefficient: of the balance loss.
        selection_bias: (L, E) float32, added to the probabilities when experts are chosen; saved with the weights. None
            unless `aux_free_rate` is set.
    """

    selection_bias: Tensor | None

    def __init__(self, routers: Mapping[str, nn.Module], options: MoEConfig, coefficient: float) -> None:
        super().__init__()
        self.options, self.coefficient = options, coefficient
        self.layers = tuple(int(re.findall(r"\d+", name)[-1]) for name in routers)
        self.num_experts = int(next(iter(routers.values())).num_experts)  # type: ignore[arg-type]
        biased = options.aux_free_rate is not None
        bias_LE = torch.zeros(len(routers), self.num_experts, dtype=torch.float32) if biased else None
        self.register_buffer("selection_bias", bias_LE)
        self._choices: dict[int, Choice] | None = None
        self._totals: Tensor | None = None  # of this rank in this optimizer step; see `loss_sum`
        self._seen: Tensor | None = None  # counts and tokens of all ranks in this optimizer step
        for row, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._after_router, row))

    @property
    def is_active(self) -> bool:
        """Whether it changes training, rather than only watching."""
        return self._has_losses or bool(self.options.aux_free_rate)

    def describe(self) -> str:
        """What balances the experts, in a line."""
        options = self.options
        ways = [
            f"balance loss {self.coefficient:g} ({options.balance_scope}, by {options.balance_over})"
            if self.coefficient
            else "",
            f"z-loss {options.z_loss:g}" if options.z_loss else "",
            f"bias in steps of {options.aux_free_rate:g}" if options.aux_free_rate is not None else "",
        ]
        return ", ".join(way for way in ways if way) or "nothing balances them"

    @property
    def _has_losses(self) -> bool:
        return self.coefficient > 0 or self.options.z_loss > 0

    def _after_router(self, row: int, router: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, experts = output
        if self.selection_bias is not None:
            biased_weights, experts = choose(router, logits, self.selection_bias[row])
            output = (logits, biased_weights.to(weights.dtype), experts)
        if self._choices is not None:
            self._choices[row] = Choice(logits, experts)
        return output

    @contextmanager
    def recording(self) -> Iterator[dict[int, Choice]]:
        """Inside, every router's choice is put into the dictionary, by the row of its layer."""
        choices: dict[int, Choice] = {}
        self._choices = choices
        try:
            yield choices
        finally:
            self._choices = None

    def loss_sum(self, choices: Mapping[int, Choice], batch: Batch) -> Tensor:
        """The losses of one micro-batch with their coefficients, as a sum that may be added to the sum of token losses.

        The loop divides by the targets of the global batch, so a mean over tokens is multiplied by targets here. With
        scope `micro` the means are over this micro-batch and the targets are its own. With `global` they are over all
        ranks' micro-batches, and loads over all that the optimizer step has seen so far.

        Source: Demons in the Detail (https://arxiv.org/abs/2501.11873) for `global`.
        """
        with torch.set_grad_enabled(self._has_losses and torch.is_grad_enabled()):
            own = routing_sums([choices[row] for row in range(len(self.layers))], batch.attention_mask.flatten())
            load_LE, tokens, weight = self._scope(own, batch.target_weight)
            balance = weight * balance_loss(load_LE, own.probs / tokens, self.options.balance_over)
            z = weight * own.z.mean() / tokens
        numbers = torch.stack([balance.detach(), z.detach(), own.tokens.new_tensor(batch.target_weight)])
        totals = torch.cat([own.counts.flatten(), numbers]).double()
        self._totals = totals if self._totals is None else self._totals + totals
        return self.coefficient * balance + self.options.z_loss * z

    def _scope(self, own: RoutingSums, target_weight: float) -> tuple[Tensor, Tensor, Tensor]:
        """Loads (L, E), tokens that sums are divided by, targets that means are multiplied by."""
        weight = own.tokens.new_tensor(target_weight)
        tokens = own.tokens.clamp(min=1)
        if self.options.balance_scope == "micro":
            return own.counts / tokens, tokens, weight
        everywhere = _sum_over_ranks(torch.cat([own.counts.flatten(), torch.stack([own.tokens, weight])]).double())
        *_, all_tokens, all_weight = everywhere.unbind()
        seen = everywhere[:-1] if self._seen is None else self._seen + everywhere[:-1]
        self._seen = seen
        load_LE = seen[:-1].view_as(own.counts) / seen[-1].clamp(min=1)
        return load_LE.float(), all_tokens.clamp(min=1).float(), all_weight.float()

    def finish_step(self) -> Load | None:
        """Loads of the optimizer step that ends, over all ranks; the bias is moved and the next step begins.

        Called on all ranks, once an optimizer step. None where nothing was recorded.

        Source: Auxiliary-Loss-Free Load Balancing (https://arxiv.org/abs/2408.15664), algorithm 1, for the bias.
        """
        if self._totals is None:
            return None
        totals, self._totals, self._seen = _sum_over_ranks(self._totals), None, None
        counts_LE = totals[:-3].view(len(self.layers), self.num_experts)
        if self.selection_bias is not None and self.options.aux_free_rate:
            error_LE = counts_LE.mean(-1, keepdim=True) - counts_LE
            self.selection_bias += self.options.aux_free_rate * error_LE.sign().float()
        numbers = totals.cpu()
        balance, z, weight = numbers[-3:].tolist()
        counts_LE = numbers[:-3].view(len(self.layers), self.num_experts)
        return Load(self.layers, counts_LE, balance / (weight or 1.0), z / (weight or 1.0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A cast to bf16 leaves the bias in float32: its steps are too small for bf16."""
        bias_LE = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias_LE is not None and self.selection_bias is not None:
            self.selection_bias = bias_LE.to(self.selection_bias.device)
        return self


def _sum_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values
