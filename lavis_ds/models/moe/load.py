"""How evenly the experts were loaded in one optimizer step, over all micro-batches and ranks.

Shape suffixes: L layers with experts, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Load:
    """Counts of one optimizer step.

    Attributes:
        layers: numbers of the layers with experts, as in the model.
        counts: (L, E), how many tokens chose each expert; float64 on the CPU. Padding is left out.
        balance_loss: mean over the step, before its coefficient.
        z_loss: mean over the step, before its coefficient.
    """

    layers: tuple[int, ...]
    counts: Tensor
    balance_loss: float
    z_loss: float

    @property
    def relative_LE(self) -> Tensor:
        """Counts divided by their layer's mean: 1 everywhere where the load is even."""
        return self.counts / self.counts.mean(-1, keepdim=True).clamp(min=1e-9)

    @property
    def max_load(self) -> float:
        """Load of the fullest expert of any layer, as a multiple of its layer's mean; E where it gets every token."""
        return float(self.relative_LE.max())

    @property
    def entropy_L(self) -> Tensor:
        """Entropy of each layer's load, divided by that of an even one: 1 at best, 0 where one expert gets all."""
        share_LE = self.counts / self.counts.sum(-1, keepdim=True).clamp(min=1e-9)
        return -(share_LE * share_LE.clamp(min=1e-30).log()).sum(-1) / math.log(share_LE.shape[-1])

    def metrics(self, *, full: bool) -> dict[str, Any]:
        """Numbers by name; with `full` each layer's counts too, as a list of integers.

        No token is dropped, since experts have no capacity; so no number says how many were.
        """
        highest, lowest, entropy = self.relative_LE.amax(-1), self.relative_LE.amin(-1), self.entropy_L
        found: dict[str, Any] = {
            "moe/balance_loss": self.balance_loss,
            "moe/z_loss": self.z_loss,
            "moe/max_load": self.max_load,
            "moe/min_load": float(lowest.min()),
            "moe/entropy": float(entropy.mean()),
        }
        for row, layer in enumerate(self.layers):
            prefix = f"moe/layer_{layer:02d}"
            found[f"{prefix}/max_load"] = float(highest[row])
            found[f"{prefix}/min_load"] = float(lowest[row])
            found[f"{prefix}/entropy"] = float(entropy[row])
            if full:
                found[f"{prefix}/tokens_by_expert"] = self.counts[row].long().tolist()
        return found
