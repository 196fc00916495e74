"""DeepSpeed's settings: read, checked against the installed DeepSpeed, and derived from `run:`. No torch, no deepspeed.

`run:` owns batch size, accumulation, learning rate, precision and clipping. `run.deepspeed_config` holds what only
DeepSpeed has, such as `zero_optimization`; a number written in both places must be the same. Without
`zero_optimization` the stage is 2 (optimizer states and gradients are partitioned, parameters are not), and on a single
rank 0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavis_ds.config.load import configs_dir
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines import ds_optimizer
from lavis_ds.engines.ds_lint import DEFAULT_ZERO_STAGE, OWNERS, WHERE, checked
from lavis_ds.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x accumulation x data-parallel ranks, in samples."""

    global_batch_size: int
    micro_batch_size: int
    accumulation: int


def batch_plan(run: RunConfig, data_parallel_size: int) -> BatchPlan:
    """The three batch numbers from those that `run` gives; accumulation is 1 where nothing else determines it.

    Raises:
        ConfigError: they do not multiply to whole numbers; the message shows the multiplication.
    """
    total, micro, accumulation = run.global_batch_size, run.batch_size_train, run.accum_grad_iters
    ranks = data_parallel_size
    if total is None:
        if micro is None:
            raise ConfigError("neither batch_size_train nor global_batch_size is given; set one.", where="run")
        accumulation = accumulation or 1
        return BatchPlan(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        factors = f"batch_size_train x {accumulation} (accum_grad_iters) x {ranks} (ranks)"
        micro = _whole_factor(total, accumulation * ranks, factors)
    elif accumulation is None:
        factors = f"{micro} (batch_size_train) x accum_grad_iters x {ranks} (ranks)"
        accumulation = _whole_factor(total, micro * ranks, factors)
    product = micro * accumulation * ranks
    if product != total:
        factors = f"{micro} (batch_size_train) x {accumulation} (accum_grad_iters) x {ranks} (ranks)"
        hint = "Leave one of the three out; it is derived."
        raise ConfigError(f"{factors} = {product}, not {total}.", where="run.global_batch_size", hint=hint)
    return BatchPlan(total, micro, accumulation)


def _whole_factor(total: int, divisor: int, factors: str) -> int:
    if total % divisor == 0:
        return total // divisor
    below = total // divisor * divisor
    nearest = " or ".join(str(n) for n in (below, below + divisor) if n)
    raise ConfigError(
        f"{total} = {factors} has no whole solution: {total} / {divisor} = {total / divisor:.4g}.",
        where="run.global_batch_size",
        expected=f"a multiple of {divisor}, such as {nearest}",
    )


def load(value: Mapping[str, Any] | str) -> dict[str, Any]:
    """Settings from what `run.deepspeed_config` holds.

    Args:
        value: the settings themselves; the name of a preset in configs/deepspeed, such as `zero3`; the path of a JSON
            file; or a mapping with `preset` (a name or path) and settings that go over it.

    Raises:
        ConfigError: the file is missing, or does not hold a JSON object.
    """
    if isinstance(value, str):
        return _read_json(value)
    if "preset" not in value:
        return copy.deepcopy(dict(value))
    preset = value["preset"]
    if not isinstance(preset, str):
        raise ConfigError("this must name a preset or a JSON file.", where=f"{WHERE}.preset", given=repr(preset))
    return _overlay(_read_json(preset), {name: setting for name, setting in value.items() if name != "preset"})


def _read_json(name: str) -> dict[str, Any]:
    folder = configs_dir() / "deepspeed"
    path = Path(name).expanduser() if Path(name).suffix or len(Path(name).parts) > 1 else folder / f"{name}.json"
    if not path.is_file():
        presets = sorted(file.stem for file in folder.glob("*.json"))
        raise ConfigError(
            f"there is neither a file nor a preset {name!r}.",
            where=WHERE,
            expected=f"the path of a JSON file, or one of {', '.join(presets)}",
            hint=did_you_mean(Path(name).stem, presets),
        )
    try:
        settings = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except ValueError as error:  # not UTF-8, not JSON, or a duplicate
        raise ConfigError(f"{path} is not valid JSON: {error}.", where=WHERE) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a JSON object.", where=WHERE, given=type(settings).__name__)
    return settings


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [name for name in dict(pairs) if names.count(name) > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return dict(pairs)


def _overlay(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for name, value in override.items():
        below = merged.get(name)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _overlay(below, value) if nested else copy.deepcopy(value)  # type: ignore[arg-type]
    return merged


def lint(config: Mapping[str, Any]) -> None:
    """Check settings against the schema of the installed DeepSpeed, which itself ignores most of what it does not know.

    Raises:
        ConfigError: with one line for each unknown, removed, mistyped or impossible setting.
    """
    checked(config)


def derive(run: RunConfig, plan: BatchPlan, *, data_parallel_size: int) -> dict[str, Any]:
    """What `deepspeed.initialize(config=...)` gets: the numbers of `run`, and everything else that the user wrote.

    The optimizer is not in it; the engine builds it from `run`.

    Raises:
        ConfigError: the settings are wrong by themselves (see `lint`) or disagree with `run`.
    """
    if plan.micro_batch_size * plan.accumulation * data_parallel_size != plan.global_batch_size:
        raise ConfigError(f"{plan} does not fit {data_parallel_size} ranks.", where="run.global_batch_size")
    settings = checked(load(run.deepspeed_config))
    owned = _owned_values(run, plan)
    _refuse_disagreement(settings, owned)
    settings.pop("optimizer", None)
    ds_optimizer.check(run, settings)
    default = default_stage(run, settings, data_parallel_size)
    stage = int(settings.get("zero_optimization", {}).get("stage", default))
    _check_secondary_shards(settings, data_parallel_size)
    return {
        "wall_clock_breakdown": False,
        **settings,
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": owned["gradient_clipping"],
        "bf16": {
            **(settings.get("bf16") or {}),
            "enabled": run.precision == "bf16",
            **ds_optimizer.bf16_block(run, stage),
        },
        "fp16": {**settings.get("fp16", {}), "enabled": run.precision == "fp16"},
        "zero_optimization": {"stage": stage, **settings.get("zero_optimization", {})},
    }


def default_stage(run: RunConfig, settings: Mapping[str, Any], data_parallel_size: int) -> int:
    """The ZeRO stage of a run that names none: 2, or 0 where a single rank has nothing to share.

    Below ZeRO, fp16 has a slower wrapper, and settings of ZeRO say that it is wanted.
    """
    if data_parallel_size == 1 and run.precision != "fp16" and not settings.get("zero_optimization"):
        return 0
    return DEFAULT_ZERO_STAGE


def zero_stage(run: RunConfig, data_parallel_size: int) -> int:
    """The ZeRO stage that the run will have; 0 without DeepSpeed.

    Raises:
        ConfigError: the settings are wrong.
    """
    if run.engine != "deepspeed":
        return 0
    settings = checked(load(run.deepspeed_config))
    default = default_stage(run, settings, data_parallel_size)
    return int(settings.get("zero_optimization", {}).get("stage", default))


def _check_secondary_shards(settings: Mapping[str, Any], data_parallel_size: int) -> None:
    """Raises:
    ConfigError: ZeRO++'s second set of shards does not divide the ranks.
    """
    shards = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if shards > 1 and (data_parallel_size % shards or shards > data_parallel_size):
        raise ConfigError(
            "this must divide the number of ranks; it is usually the GPUs of a machine.",
            where=f"{WHERE}.zero_optimization.zero_hpz_partition_size",
            given=f"{shards} with {data_parallel_size} ranks",
        )


def log_level(run: RunConfig, settings: Mapping[str, Any]) -> str:
    """The level at which DeepSpeed's logger prints what the user asked for: some of its tools speak at `info` only."""
    speaks = settings.get("memory_breakdown") or settings.get("dump_state")
    speaks = speaks or settings.get("comms_logger", {}).get("verbose")
    return "info" if speaks and run.log_level != "debug" else run.log_level


def _owned_values(run: RunConfig, plan: BatchPlan) -> dict[str, Any]:
    clip = run.grad_clip or 0.0  # DeepSpeed's way to switch clipping off
    return {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": clip,
        "bf16.enabled": run.precision == "bf16",
        "fp16.enabled": run.precision == "fp16",
        "optimizer.params.lr": run.init_lr,
        "optimizer.params.betas": list(run.optimizer.betas),
        "optimizer.params.eps": run.optimizer.eps,
        "optimizer.params.weight_decay": run.weight_decay,
        "optimizer.params.max_grad_norm": clip,
    }


def _refuse_disagreement(settings: Mapping[str, Any], owned: Mapping[str, Any]) -> None:
    findings = []
    for path, right in owned.items():
        given = _get(settings, path)
        if given is None or given == right:
            continue
        owner = OWNERS[path]
        findings.append(
            f"{WHERE}.{path}: this is {given}, but {owner} makes it {right}. Set it in {owner} and remove it here."
        )
    if findings:
        raise ConfigError("\n".join(findings))


def _get(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return list(tree) if isinstance(tree, tuple) else tree
