"""Which optimizers and places for their states go together, and with checkpoints. No torch, no deepspeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError

CHOICES = "run.optimizer.name takes adamw, adamw_8bit or muon; with offload_optimizer, adamw is DeepSpeed's CPU AdamW."
_BF16_ALONE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")


def refusals(zero: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of the block `zero_optimization` that DeepSpeed has and a run can't go on exactly with, and why."""
    offload = zero.get("offload_optimizer") or {}
    if zero.get("zenflow"):
        yield (
            "zenflow",
            "ZenFlow updates most weights some steps late, so it is not AdamW, and keeps part of its moments where no "
            "checkpoint reads them. Use offload_optimizer without it.",
        )
    if offload.get("super_offload"):
        yield (
            "offload_optimizer.super_offload",
            "SuperOffload keeps the moments in another process, where no checkpoint reads them. Use device: cpu alone.",
        )
    if offload.get("ratio", 1) != 1:
        yield (
            "offload_optimizer.ratio",
            "what stays on the GPU has a second optimizer, whose moments no checkpoint reads. Remove the key.",
        )
    if offload.get("device") == "nvme":
        yield (
            "offload_optimizer.device",
            "with nvme, DeepSpeed 0.19.8 updates some large weights (a share of 1 MiB or more) with wrong gradients. "
            "Use device: cpu.",
        )
    if zero.get("zero_quantized_nontrainable_weights"):
        yield (
            "zero_quantized_nontrainable_weights",
            "checkpoints would hold the rounded weights. Use `quantize: nf4` of the part for frozen weights in 4 bits.",
        )


def check(run: RunConfig, settings: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: DeepSpeed's settings need another optimizer.
    """
    name = "stochastic rounding" if run.optimizer.stochastic_rounding else run.optimizer.name
    if name == "adamw":
        return
    offload = (settings.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none")
    if offload != "none":
        raise ConfigError(
            f"optimizer states on {offload} are updated by DeepSpeed's CPU AdamW, which has no {name}.",
            where="run.optimizer",
            given=f"{name} with zero_optimization.offload_optimizer",
            hint="Use adamw, or leave the optimizer on the GPU.",
        )
    if (settings.get("data_types") or {}).get("grad_accum_dtype") is not None and name != "adamw_8bit":
        raise ConfigError(
            f"{name} takes gradients in the type of the weights.",
            where="run.deepspeed_config.data_types.grad_accum_dtype",
            hint="Remove the key, or use adamw.",
        )
    if run.optimizer.stochastic_rounding and any((settings.get("bf16") or {}).get(key) is False for key in _BF16_ALONE):
        raise ConfigError(
            f"run.optimizer.stochastic_rounding makes {' and '.join(_BF16_ALONE)} true. Remove them.",
            where="run.deepspeed_config.bf16",
        )


def bf16_block(run: RunConfig, stage: int) -> dict[str, bool]:
    """What the block `bf16` of DeepSpeed gets besides `enabled`; below ZeRO it has nothing of the kind."""
    return dict.fromkeys(_BF16_ALONE, True) if run.optimizer.stochastic_rounding and stage > 0 else {}
