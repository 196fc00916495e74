"""Memory that ran out, on the GPU or the host: at which stage, how much there was, and what to change, in order."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from lavis_ds.config.schema import RootConfig
from lavis_ds.engines import ds_config
from lavis_ds.engines.ds_lint import DEFAULT_ZERO_STAGE
from lavis_ds.errors import LavisError, MemoryExhaustedError
from lavis_ds.runners.progress import Place, Progress

Kind = Literal["GPU", "host"]

# torch and DeepSpeed raise plain RuntimeErrors for what a library (cuBLAS, cuDNN, NCCL, bitsandbytes) could not get.
_GPU_TEXT = re.compile(
    r"(CUDA|HIP|cuda\w*|Cuda failure).*out of memory|_ALLOC_FAILED|[Ee]rror out of memory", re.DOTALL
)
_HOST_TEXT = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate memory|std::bad_alloc")


@contextmanager
def explained(config: RootConfig, plan: ds_config.BatchPlan | None, progress: Progress) -> Iterator[None]:
    """Context in which memory that runs out becomes one `MemoryExhaustedError`.

    Args:
        config: the run.
        plan: its batch; None where nothing is trained.
        progress: says where the run is.
    """
    try:
        yield
    except LavisError:
        raise
    except Exception as error:
        kind = kind_of(error)
        if kind is None:
            raise
        raise _explanation(error, kind, config, plan, progress.place) from error


def kind_of(error: BaseException) -> Kind | None:
    """Which memory ran out, or None where the error is another one."""
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, RuntimeError):
        if _GPU_TEXT.search(str(error)):
            return "GPU"
        if _HOST_TEXT.search(str(error)):
            return "host"
    return None if error.__cause__ is None else kind_of(error.__cause__)


def _explanation(
    error: Exception, kind: Kind, config: RootConfig, plan: ds_config.BatchPlan | None, place: Place
) -> MemoryExhaustedError:
    first = " (the first since the start)" if place.is_first_step and place.shape else ""
    where = f"{place.doing}, step {place.step}{first}" if place.step else place.doing
    lines = str(error).strip().splitlines() or [type(error).__name__]
    batch = f"a batch of {place.shape}; " if place.shape else ""
    found = advice(config, plan, kind, place)
    numbered = "".join(f"\n  {number}. {line}" for number, line in enumerate(found, start=1))
    nothing = "Use a smaller model, or more or larger machines."
    return MemoryExhaustedError(
        f"the {'memory of the GPU' if kind == 'GPU' else 'memory of this machine'} ran out ({_amounts(kind)}).",
        where=where,
        given=f"{batch}{type(error).__name__}: {lines[0].rstrip('.')}",
        hint=f"Try next, in this order:{numbered}" if found else nothing,
    )


def _amounts(kind: Kind) -> str:
    if kind == "GPU" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"peak {_gib(torch.cuda.max_memory_allocated())} of {_gib(total)} GiB, {_gib(free)} GiB free"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peak {_gib(peak)} GiB of this process, {_gib(_available_bytes())} GiB available"


def _available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


# ---- what to try -----------------------------------------------------------------------------------------------------


def advice(config: RootConfig, plan: ds_config.BatchPlan | None, kind: Kind, place: Place) -> list[str]:
    """Settings that this run does not use yet and that save memory where it ran out, the cheapest first."""
    evaluates = plan is None or place.doing.startswith("evaluating")
    building = not place.step and not evaluates
    if evaluates:
        found = _for_evaluation(config, kind)
    elif kind == "host":
        found = [*_fewer_workers(config, building), *_without_offload(config), *_smaller_model(config)]
    else:
        assert plan is not None
        activations = [] if building else [*_recomputation(config), *_smaller_batch(plan)]
        ranks = plan.global_batch_size // (plan.micro_batch_size * plan.accumulation)
        shards = [*_next_stage(config, ranks), *_smaller_states(config), *_offload(config, ranks)]
        found = [*activations, *_half_precision(config), *shards, *_smaller_model(config)]
        found += [] if building else _shorter_rows(config)
    return found


def _for_evaluation(config: RootConfig, kind: Kind) -> list[str]:
    size = config.run.batch_size_eval
    smaller = [f"run.batch_size_eval={size // 2} (now {size})"] if size > 1 else []
    return [*smaller, *(_fewer_workers(config, False) if kind == "host" else _half_precision(config))]


def _recomputation(config: RootConfig) -> list[str]:
    """A frozen vision part keeps no activations; language does even where it is frozen, for what is below it."""
    off = [
        f"model.{part}.gradient_checkpointing=full"
        for part in ("language", "vision")
        if getattr(_part(config, part), "gradient_checkpointing", None) == "none"
        and not (part == "vision" and part in config.model.freeze)
    ]
    return [f"{' '.join(off)} (recomputes activations: same result, about a third slower)"] if off else []


def _smaller_batch(plan: ds_config.BatchPlan) -> list[str]:
    rows = plan.micro_batch_size * plan.accumulation
    micro = next((size for size in range(plan.micro_batch_size // 2, 0, -1) if rows % size == 0), None)
    if micro is None:
        return []
    return [f"run.batch_size_train={micro} run.accum_grad_iters={rows // micro} (the same global batch)"]


def _half_precision(config: RootConfig) -> list[str]:
    return ["run.precision=bf16"] if config.run.precision == "fp32" else []


def _next_stage(config: RootConfig, ranks: int) -> list[str]:
    if ranks == 1:
        return []
    if config.run.engine == "torch":
        return ["run.engine=deepspeed run.deepspeed_config=zero2 (optimizer and gradients split over the ranks)"]
    stage = _zero(config).get("stage", DEFAULT_ZERO_STAGE)
    split = {0: "optimizer states", 1: "gradients", 2: "weights"}
    if stage not in split:
        return []
    return [f"run.deepspeed_config.zero_optimization.stage={stage + 1} (splits {split[stage]} over the ranks too)"]


def _smaller_states(config: RootConfig) -> list[str]:
    """Not for adapters, whose states are small, nor where DeepSpeed's own optimizer has them on the host."""
    options, part = config.run.optimizer, _part(config, "language")
    is_plain = options.name == "adamw" and not options.stochastic_rounding
    if not is_plain or getattr(part, "lora", None) is not None or _offloads(_zero(config), "offload_optimizer"):
        return []
    return ["run.optimizer.name=adamw_8bit (moments in 8 bits; needs bitsandbytes)"]


def _offload(config: RootConfig, ranks: int) -> list[str]:
    if config.run.optimizer.name != "adamw" or config.run.optimizer.stochastic_rounding:
        return ["run.optimizer={name: adamw}, which can go to host memory: run.deepspeed_config=zero2_offload"]
    if config.run.engine == "torch":
        return ["run.engine=deepspeed run.deepspeed_config=zero2_offload (optimizer states in host memory)"]
    zero = _zero(config)
    found = []
    if not _offloads(zero, "offload_optimizer"):
        preset = "zero3_offload" if zero.get("stage") == 3 else "zero2_offload"
        found.append(f"run.deepspeed_config={preset} (optimizer states in host memory; slower)")
    elif not _offloads(zero, "offload_param"):
        found.append("run.deepspeed_config=zero3_offload (weights in host memory too; much slower)")
    return found


def _without_offload(config: RootConfig) -> list[str]:
    used = [name for name in ("offload_param", "offload_optimizer") if _offloads(_zero(config), name)]
    return [f"leave {' and '.join(used)} of run.deepspeed_config out, which live in this memory"] if used else []


def _fewer_workers(config: RootConfig, building: bool) -> list[str]:
    if building:
        return ["start fewer ranks on a machine: each builds the whole model, at 4 bytes a parameter"]
    number = config.run.num_workers
    return [f"run.num_workers={number // 2} (now {number}, for each rank)"] if number else []


def _smaller_model(config: RootConfig) -> list[str]:
    part = _part(config, "language")
    if part is None or not hasattr(part, "lora"):
        return []
    if part.lora is None:
        frozen = " and take language out of model.freeze" if "language" in config.model.freeze else ""
        return [] if frozen else ["model.language.lora={r: 16} (trains low-rank adapters in place of the weights)"]
    return ["model.language.quantize=nf4 (frozen weights in 4 bits)"] if part.quantize is None else []


def _shorter_rows(config: RootConfig) -> list[str]:
    length, longest = config.data.pack_length, config.model.max_txt_len
    if config.data.batching == "packed" and length is not None and length > longest:
        return [f"data.pack_length={max(length // 2, longest)} (now {length})"]
    return [f"model.max_txt_len={longest // 2} (now {longest}; longer samples lose turns)"] if longest >= 512 else []


def _part(config: RootConfig, name: str) -> Any:
    return getattr(config.model, name, None)


def _zero(config: RootConfig) -> dict[str, Any]:
    if config.run.engine == "torch":
        return {}
    zero: dict[str, Any] = ds_config.load(config.run.deepspeed_config).get("zero_optimization", {})
    return zero


def _offloads(zero: dict[str, Any], name: str) -> bool:
    return bool((zero.get(name) or {}).get("device", "none") != "none")
