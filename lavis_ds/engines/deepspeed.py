"""DeepSpeed: ZeRO 0-3 and offload behind the `Engine` interface. The only file of the training path that imports it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines import ds_config
from lavis_ds.engines.base import StepResult, is_stored_small, persistent_buffers, saved_parameters
from lavis_ds.errors import CheckpointError
from lavis_ds.models.parts import match_constants
from lavis_ds.optim.adamw import NO_FACTORS, adamw, scale_learning_rates

_TAG = "deepspeed"


class DeepSpeedEngine:
    """See `lavis_ds.engines.base.Engine`.

    Args:
        module: the model, on the CPU, float32.
        groups: parameter groups with `lr_scale` and `weight_decay`.
        run: the `run:` block.
        plan: global batch, micro-batch and accumulation.
    """

    name = "deepspeed"

    def __init__(
        self, module: nn.Module, groups: list[dict[str, Any]], run: RunConfig, plan: ds_config.BatchPlan
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # A shared-memory all-reduce for CPU inference, which training never calls; building it delays the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.device = distributed.device()
        self.data_parallel_size, self.data_parallel_rank = distributed.world_size(), distributed.global_rank()
        self._settings = ds_config.derive(run, plan, data_parallel_size=self.data_parallel_size)
        zero = self._settings["zero_optimization"]
        self._stage = int(zero["stage"])
        self._precision, self._grad_clip = run.precision, run.grad_clip
        self.is_sharded = self._stage == 3 and self.data_parallel_size > 1
        offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        optimizer = _cpu_adam(groups, run) if offloads else adamw(groups, run)
        scale_learning_rates(optimizer, 0.0)  # see _forget_trial_step
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=self._settings
        )
        _forget_trial_step(optimizer)
        self.module: nn.Module = self._engine.module
        self._has_small_weights = any(map(is_stored_small, self.module.parameters()))
        match_constants(self.module)  # DeepSpeed casts parameters alone

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._engine(batch)
        return outputs

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        # The runner has already divided by the targets of the global batch.
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float, factors: Mapping[str, float] = NO_FACTORS) -> StepResult:
        scale_learning_rates(self._optimizer, lr, factors)
        if self._stage == 0:
            return self._step_without_zero()
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        applied = bool(self._engine.was_step_applied())
        return StepResult(norm if applied else float("inf"), applied)

    def _step_without_zero(self) -> StepResult:
        """Below ZeRO, DeepSpeed neither reports the norm nor refuses a gradient that is not finite."""
        loss_scale = float(getattr(self._optimizer, "cur_scale", 1.0))
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / loss_scale
        if not torch.isfinite(torch.tensor(norm)) and self._precision != "fp16":
            self._engine.zero_grad()
            return StepResult(float("inf"), applied=False)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        return StepResult(norm if applied else float("inf"), applied)

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, save_latest=False, exclude_frozen_parameters=self._has_small_weights
        )

    def load(self, folder: Path) -> None:
        if not (folder / _TAG).is_dir():
            raise CheckpointError(
                "this holds no state of the DeepSpeed engine.",
                where=str(folder),
                hint="Was it written by run.engine=torch?",
            )
        path, _ = self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not self._has_small_weights)
        if path is None:  # DeepSpeed's way of saying that nothing was loaded
            raise CheckpointError("DeepSpeed found no checkpoint here.", where=str(folder))

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in saved_parameters(self.module):
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                yield name, parameter.detach()
        yield from persistent_buffers(self.module)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "data_parallel_size": self.data_parallel_size,
            "zero_stage": self._stage,
            "precision": self._precision,
            "deepspeed": deepspeed.__version__,
        }


def _forget_trial_step(optimizer: torch.optim.Optimizer) -> None:
    """Undo what some of DeepSpeed's wrappers (bf16 and fp16 below ZeRO, for one) do to AdamW when they are made.

    They take a step with zero gradients to allocate the moments. At learning rate 0 that leaves the weights alone, but
    the step is counted, and the bias correction of every later step would be off.
    """
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def _cpu_adam(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for optimizer states that live in host memory."""
    optimizer: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps, adamw_mode=True
    )
    return optimizer
