"""DeepSpeed: ZeRO 0-3 and offload behind the `Engine` interface. The only file of the training path that imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines import ds_config, ds_fragments
from lavis_ds.engines.base import StepResult, fill_weights, persistent_buffers, saved_parameters, weight_of
from lavis_ds.engines.fragments import Fragment, StoredFragments, restore
from lavis_ds.models.parts import match_constants
from lavis_ds.optim.adamw import NO_FACTORS, adamw, scale_learning_rates

_SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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
        # A shared-memory all-reduce for CPU inference, which training never calls; building it delays the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.device = distributed.device()
        self.data_parallel_size, self.data_parallel_rank = distributed.world_size(), distributed.global_rank()
        self._settings = ds_config.derive(run, plan, data_parallel_size=self.data_parallel_size)
        deepspeed.utils.logging.set_log_level_from_string(ds_config.log_level(run, self._settings))
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
        _lighten(self._engine.optimizer)
        self.module: nn.Module = self._engine.module
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

    def fragments(self) -> Iterator[Fragment]:
        engine = self._engine
        found = ds_fragments.fragments(
            self.module, engine.optimizer, engine.basic_optimizer, self.data_parallel_rank, self.data_parallel_size
        )
        # In float32 the weights are their own masters, and are in the checkpoint already.
        return (replace(fragment, has_own_master=self._precision != "fp32") for fragment in found)

    def scaler_state(self) -> dict[str, float]:
        if self._precision != "fp16":
            return {}
        scaler = self._loss_scaler
        return {key: getattr(scaler, key) for key in _SCALE_KEYS if getattr(scaler, key, None) is not None}

    @torch.no_grad()
    def restore(
        self, stored: StoredFragments, weights: Mapping[str, Tensor], scaler_state: Mapping[str, float]
    ) -> list[str]:
        self._fill_weights(weights)
        if self._precision == "fp16":
            for key, value in scaler_state.items():
                if hasattr(self._loss_scaler, key):
                    setattr(self._loss_scaler, key, value)
        return restore(self.fragments(), stored, weights)

    @property
    def _loss_scaler(self) -> Any:
        """What holds the loss scale: of ZeRO's optimizers, or of the wrapper below ZeRO."""
        optimizer = self._engine.optimizer
        return optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config

    def _fill_weights(self, weights: Mapping[str, Tensor]) -> None:
        if self._stage < 3:
            fill_weights(self.module, weights)
            return
        for name, parameter in saved_parameters(self.module):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.data_parallel_rank == 0:
                    parameter.copy_(weight_of(weights, name, parameter.shape))
        for name, buffer in persistent_buffers(self.module):
            buffer.copy_(weight_of(weights, name, buffer.shape))

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in saved_parameters(self.module):
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                yield name, parameter.detach()
        yield from persistent_buffers(self.module)

    def finish(self) -> None:
        if self._settings.get("comms_logger", {}).get("enabled"):
            deepspeed.comm.log_summary()

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


def _lighten(optimizer: Any) -> None:
    """Take a look at every gradient in ZeRO-1 and 2 in a few kernels: by itself DeepSpeed looks at one after the other.

    With some hundred parameters that is a thousand launches a step, twice: for what is not finite, then for the norm,
    which alone tells as much (-1 where a gradient is not finite, upon which the step is left out).
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return  # another stage; and with offload, norms are taken as gradients arrive on the host

    def norm(gradients: Iterable[Tensor], _: Any, norm_type: float = 2.0) -> Tensor:
        found = [g for g in gradients if g is not None and not getattr(g, "_zero_padding", False)]
        total = torch.zeros((), device=optimizer.device)
        if found:
            total += torch.stack(torch._foreach_norm(found, norm_type, dtype=torch.float32)).pow(norm_type).sum()
        deepspeed.comm.all_reduce(total, group=optimizer.dp_process_group)
        total = total.pow(1 / norm_type)
        return torch.where(total.isfinite(), total, -1.0)

    optimizer.get_grad_norm_direct = norm
    optimizer.check_overflow = lambda partition_gradients=True: None


def _cpu_adam(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for optimizer states that live in host memory."""
    optimizer: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps, adamw_mode=True
    )
    return optimizer
