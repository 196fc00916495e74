"""Operations a second, and their share of what the GPU could do (model FLOPs utilisation, MFU)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lavis_ds import distributed
from lavis_ds.models.work import Amount, Work

_PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L20": 119, "L4": 121, "A10G": 70, "A10": 125, "A40": 150,
    "A30": 165, "A6000": 155, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Part of a GPU's name -> dense products in 16 bits, by NVIDIA's data sheets. The first that fits counts."""


class Speed:
    """What a step's time means for the model at hand.

    Args:
        work: operations of the model.
        precision: of the run; the peaks are those of 16 bits.
    """

    def __init__(self, work: Work, precision: str) -> None:
        self._work, self._ranks = work, distributed.world_size()
        self._peak = peak_tflops(_device_name()) if precision != "fp32" else None

    def metrics(self, amount: Amount, step_s: float) -> Mapping[str, float]:
        """`throughput/tflops` of a rank, and `throughput/mfu` where the GPU's peak is known."""
        if not self._work.in_flops:
            return {}
        tflops = self._work.total(amount) / step_s / self._ranks / 1e12
        share = {} if self._peak is None else {"throughput/mfu": tflops / self._peak}
        return {"throughput/tflops": tflops, **share}


def peak_tflops(name: str) -> float | None:
    """Dense products in 16 bits of the GPU of this name; None where it is not known."""
    return next((float(peak) for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
