"""Plain PyTorch: DistributedDataParallel and AdamW. The reference that DeepSpeed is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines.base import StepResult, every, fill_weights, persistent_buffers, saved_parameters
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.engines.fragments import Fragment, StoredFragments, restore, whole
from lavis_ds.errors import ConfigError
from lavis_ds.optim import optimizers
from lavis_ds.optim.adamw import NO_FACTORS, scale_learning_rates


class TorchEngine:
    """See `lavis_ds.engines.base.Engine`. bf16 is autocast over float32 weights; fp16 is left to DeepSpeed.

    Args:
        module: the model, on the CPU.
        groups: parameter groups with `lr_scale` and `weight_decay`.
        run: the `run:` block.
        plan: not needed here; every engine is built alike.

    Raises:
        ConfigError: fp16 is asked for.
    """

    name = "torch"
    is_sharded = False

    def __init__(self, module: nn.Module, groups: list[dict[str, Any]], run: RunConfig, plan: BatchPlan) -> None:
        if run.precision == "fp16":
            raise ConfigError(
                "the torch engine has no loss scaling.",
                where="run.precision",
                given="fp16",
                hint="Use bf16, or run.engine=deepspeed.",
            )
        self.device = distributed.device()
        self.data_parallel_size, self.data_parallel_rank = distributed.world_size(), distributed.global_rank()
        self.module = module.to(self.device)
        self._precision = run.precision
        self._grad_clip = run.grad_clip
        self._optimizer = optimizers.build(groups, run)
        self.trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._forward: nn.Module = self.module
        if self.data_parallel_size > 1:
            devices = [self.device] if self.device.type == "cuda" else None
            self._forward = DistributedDataParallel(self.module, device_ids=devices, broadcast_buffers=False)

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            outputs: tuple[Tensor, ...] = self._forward(batch)
        return outputs

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients are exchanged in the last micro-batch only."""
        if is_last or not isinstance(self._forward, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._forward.no_sync()

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self, lr: float, factors: Mapping[str, float] = NO_FACTORS) -> StepResult:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        applied = bool(norm.isfinite())
        if applied:
            if self._grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._grad_clip, norm)
            scale_learning_rates(self._optimizer, lr, factors)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(float(norm) if applied else float("inf"), applied)

    def fragments(self) -> Iterator[Fragment]:
        named = self.module.named_parameters()
        return whole(named, self._optimizer, rank=self.data_parallel_rank, world_size=self.data_parallel_size)

    def scaler_state(self) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def restore(
        self,
        stored: StoredFragments,
        weights: Mapping[str, Tensor],
        scaler_state: Mapping[str, float],
        kept: Container[str] = (),
    ) -> list[str]:
        fill_weights(self.module, weights, kept)
        return restore(self.fragments(), stored, weights, kept)

    def full_tensors(self, wanted: Callable[[str], bool] = every) -> Iterator[tuple[str, Tensor]]:
        yield from (pair for pair in saved_parameters(self.module) if wanted(pair[0]))
        yield from (pair for pair in persistent_buffers(self.module) if wanted(pair[0]))

    def finish(self) -> None:
        """There are no tools."""

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "data_parallel_size": self.data_parallel_size, "precision": self._precision}
