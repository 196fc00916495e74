"""Numbers that the host reads without waiting for what the device was told to do afterwards."""

from __future__ import annotations

import torch
from torch import Tensor


class OnHost:
    """A small tensor on its way to the host.

    Reading a tensor waits for everything that is queued by then; this waits for what was queued before it was made.

    Args:
        value: on any device; filled when the current stream gets there.
    """

    def __init__(self, value: Tensor) -> None:
        value = value.detach()
        self._arrived: torch.cuda.Event | None = None
        self._value = value.clone() if not value.is_cuda else torch.empty_like(value, device="cpu", pin_memory=True)
        if value.is_cuda:
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def tensor(self) -> Tensor:
        """It, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value

    def __float__(self) -> float:
        return float(self.tensor())
