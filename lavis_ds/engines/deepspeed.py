"""DeepSpeed: ZeRO 0-3 and offload behind the `Engine` interface. The only file of the training path that imports it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines import ds_config, ds_fragments, ds_partition, ds_speed
from lavis_ds.engines.base import StepResult, every, persistent_buffers, saved_parameters, weight_of
from lavis_ds.engines.ds_bundles import Bundles
from lavis_ds.engines.fragments import Fragment, StoredFragments, restore
from lavis_ds.models.parts import match_constants
from lavis_ds.optim import optimizers
from lavis_ds.optim.adamw import NO_FACTORS, scale_learning_rates
from lavis_ds.optim.master_adamw import MasterAdamW
from lavis_ds.optim.muon import Muon
from lavis_ds.optim.stochastic_rounding import StochasticAdamW
from lavis_ds.shares import stretch

_USE_PARAMETERS = (
    deepspeed.runtime.zero.partitioned_param_coordinator,
    deepspeed.runtime.zero.parameter_offload,
)
_SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedEngine:
    """See `lavis_ds.engines.base.Engine`.

    Args:
        module: the model, on the CPU, float32.
        groups: parameter groups with `lr_scale` and `weight_decay`.
        run: the `run:` block.
        plan: global batch, micro-batch and accumulation.

    Attributes:
        bundles: how parameters of `module` hold those of the model that came in.
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
        self._precision = run.precision
        self.is_sharded = self._stage == 3 and self.data_parallel_size > 1
        self._rounds_masters = run.optimizer.stochastic_rounding
        self.trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if self._stage == 3:
            layers = ds_speed.gather_by_layer(module, zero, deepspeed.utils.set_z3_leaf_modules)
        else:
            layers = ds_speed.whole_layers(module) if self._stage else []
        self.bundles = Bundles(module, layers if ds_speed.can_bundle(run, zero) else [], groups)
        if self._stage == 3:
            self.bundles.collect_by_layer()
        optimizer = _optimizer(self.bundles.groups, run, self._settings)
        settings = _settings_with(optimizer, self._settings)
        by_muon = {id(p) for group in groups if group.get("uses_muon") for p in group["params"]}
        by_muon_names = [name for name, parameter in module.named_parameters() if id(parameter) in by_muon]
        _allow_in_zero(optimizer)
        scale_learning_rates(optimizer, 0.0)  # see _forget_trial_step
        is_cast = settings["bf16"]["enabled"] or settings["fp16"]["enabled"]
        exact = self._unrounded(module) if is_cast else {}
        if self.is_sharded:
            deepspeed.init_distributed()  # takes over the group that there is, as `initialize` does, but later
            found = ds_partition.partition(module, self.bundles, deepspeed.zero.Init, settings, self.device)
            exact |= found if is_cast else {}
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        _forget_trial_step(optimizer)
        if isinstance(optimizer, MasterAdamW):
            optimizer.keep_masters(torch.bfloat16)
        if settings["bf16"]["enabled"] != self._settings["bf16"]["enabled"]:
            _cast(self._engine.module, torch.bfloat16)
        if isinstance(optimizer, StochasticAdamW) and self._stage > 0:
            optimizer.shard = self.data_parallel_rank
        if isinstance(optimizer, Muon):
            optimizer.flats = ds_fragments.pieces(
                self._engine.module, by_muon_names, self._engine.optimizer, self.bundles
            )
        if self._stage == 0 and self.data_parallel_size == 1:
            self._engine.enable_backward_allreduce = False  # it copies all gradients to and fro, for one rank too
        ds_speed.look_at_gradients_together(self._engine.optimizer)
        ds_speed.scale_in_update(self._engine.optimizer, optimizer)
        ds_speed.be_brief(self._settings, deepspeed.utils, deepspeed.runtime.zero, deepspeed.get_accelerator())
        if self._stage == 3:
            ds_speed.remember_parameters([module, *layers], _USE_PARAMETERS)
            self.bundles.follow(self._engine.optimizer.parameter_offload.get_param_coordinator())
        elif self._stage:
            self.bundles.stay(self._engine.optimizer)
        self.module: nn.Module = self._engine.module
        self._fill_masters(exact)
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
        ready = None if self._precision == "fp16" else getattr(self._engine.optimizer, "norm_on_host", None)
        norm = float(self._engine.get_global_grad_norm() if ready is None else ready)
        applied = bool(self._engine.was_step_applied())
        return StepResult(norm if applied else float("inf"), applied)

    def _step_without_zero(self) -> StepResult:
        """Below ZeRO, DeepSpeed neither reports the norm nor refuses a gradient that is not finite."""
        if isinstance(self._optimizer, MasterAdamW):
            self._engine.step()
            norm = self._optimizer.last_norm()
            applied = math.isfinite(norm)
            return StepResult(norm if applied else float("inf"), applied)
        loss_scale = float(getattr(self._optimizer, "cur_scale", 1.0))
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / loss_scale
        if not math.isfinite(norm) and self._precision != "fp16":
            self._engine.zero_grad()
            return StepResult(float("inf"), applied=False)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        return StepResult(norm if applied else float("inf"), applied)

    def fragments(self) -> Iterator[Fragment]:
        optimizer, base = self._engine.optimizer, self._engine.basic_optimizer
        rank, size = self.data_parallel_rank, self.data_parallel_size
        found = ds_fragments.fragments(self.module, optimizer, base, self.bundles, rank, size)
        # Otherwise the masters are the weights, and these are in the checkpoint already.
        has_own_master = self._precision != "fp32" and not self._rounds_masters
        return (replace(fragment, has_own_master=has_own_master) for fragment in found)

    def scaler_state(self) -> dict[str, float]:
        if self._precision != "fp16":
            return {}
        scaler = self._loss_scaler
        return {key: getattr(scaler, key) for key in _SCALE_KEYS if getattr(scaler, key, None) is not None}

    @torch.no_grad()
    def restore(
        self,
        stored: StoredFragments,
        weights: Mapping[str, Tensor],
        scaler_state: Mapping[str, float],
        kept: Container[str] = (),
    ) -> list[str]:
        self._fill_weights(weights, kept)
        if self._precision == "fp16":
            for key, value in scaler_state.items():
                if hasattr(self._loss_scaler, key):
                    setattr(self._loss_scaler, key, value)
        fresh = restore(self.fragments(), stored, weights, kept)
        if isinstance(self._engine.basic_optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam):
            _count_up(self._engine.basic_optimizer)
        return fresh

    def _unrounded(self, module: nn.Module) -> dict[str, tuple[int, Tensor]]:
        """This rank's stretches of what trains, but for bundles that are still in shares."""
        found: dict[str, tuple[int, Tensor]] = {}
        for name, parameter in _trained_in_float32(module):
            bundle = self.bundles.of(parameter)
            if bundle is None or not bundle.is_in_shares():
                found |= self.bundles.stretches(name, parameter, *stretch(parameter))
        return found

    @torch.no_grad()
    def _fill_masters(self, exact: Mapping[str, tuple[int, Tensor]]) -> None:
        """DeepSpeed makes masters of weights that it has rounded already; these are the ones before that."""
        for fragment in self.fragments() if exact else ():
            if fragment.name in exact and fragment.master.dtype == torch.float32:
                first, values = exact[fragment.name]
                fragment.master.copy_(values[fragment.start - first :][: fragment.master.numel()])

    @property
    def _loss_scaler(self) -> Any:
        """What holds the loss scale: of ZeRO's optimizers, or of the wrapper below ZeRO."""
        optimizer = self._engine.optimizer
        return optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config

    def _fill_weights(self, weights: Mapping[str, Tensor], kept: Container[str]) -> None:
        is_sharded = self._stage == 3
        for name, parameter in saved_parameters(self.module):
            members = [member for member in self.bundles.members(name, parameter) if member.name not in kept]
            if not members:
                continue
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded):
                for member in members if self.data_parallel_rank == 0 or not is_sharded else ():
                    own = member.of(parameter)
                    own.copy_(weight_of(weights, member.name, own.shape))
        for name, buffer in persistent_buffers(self.module):
            if name not in kept:
                buffer.copy_(weight_of(weights, name, buffer.shape))

    def full_tensors(self, wanted: Callable[[str], bool] = every) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in saved_parameters(self.module):
            members = [member for member in self.bundles.members(name, parameter) if wanted(member.name)]
            if not members:
                continue
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                for member in members:
                    yield member.name, member.of(parameter.detach())
        yield from (pair for pair in persistent_buffers(self.module) if wanted(pair[0]))

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


def _trained_in_float32(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            yield name, parameter


def _optimizer(groups: list[dict[str, Any]], run: RunConfig, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """AdamW where the states live: on the host, on the device beside masters, or inside DeepSpeed's wrapper of it."""
    zero = settings["zero_optimization"]
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        return _cpu_adam(groups, run)
    is_plain = run.optimizer.name == "adamw" and not run.optimizer.stochastic_rounding
    if zero["stage"] == 0 and run.precision == "bf16" and is_plain and not _sums_in_another_type(settings):
        return MasterAdamW(groups, run)
    return optimizers.build(groups, run)


def _sums_in_another_type(settings: Mapping[str, Any]) -> bool:
    """Whether gradients are to be added up in a type of their own, for which DeepSpeed has a wrapper."""
    return (settings.get("data_types") or {}).get("grad_accum_dtype") not in (None, "bf16")


def _settings_with(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """What `deepspeed.initialize` gets: nothing of what the optimizer sees to, around which it would put a wrapper."""
    if isinstance(optimizer, MasterAdamW):
        return {**settings, "bf16": {"enabled": False}, "gradient_clipping": 0.0}
    if isinstance(optimizer, StochasticAdamW) and settings["zero_optimization"]["stage"] == 0:
        return {**settings, "bf16": {"enabled": False}}
    return settings


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _allow_in_zero(optimizer: torch.optim.Optimizer) -> None:
    """ZeRO takes optimizers of its own list; those of `run.optimizer` are tested with it here."""
    supported = deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS
    if type(optimizer) not in supported:
        supported.append(type(optimizer))


def _cpu_adam(groups: list[dict[str, Any]], run: RunConfig) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for optimizer states that live in host memory."""
    optimizer: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        groups, lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps, adamw_mode=True
    )
    return optimizer


def _count_up(optimizer: Any) -> None:
    """Let DeepSpeed's AdamW for the host count the steps that a checkpoint has, one after the other.

    It multiplies the powers of its betas up from step to step. At a step that does not follow the last one it would
    take a power, which is rounded otherwise, and the run would go on 1e-7 off.
    """
    options, nothing = optimizer.defaults, [torch.zeros(1) for _ in range(4)]
    steps = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, 0.0, *options["betas"], options["eps"], 0.0, options["bias_correction"], *nothing
        )
