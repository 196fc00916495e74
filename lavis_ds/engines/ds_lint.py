"""Check `run.deepspeed_config` against the installed DeepSpeed's schema; DeepSpeed itself ignores most unknown keys."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

from lavis_ds.engines import ds_optimizer
from lavis_ds.engines.ds_schema import Key, Schema, installed_schema
from lavis_ds.errors import ConfigError, did_you_mean

WHERE = "run.deepspeed_config"
DEFAULT_ZERO_STAGE = 2

# The key of `run:` that owns a DeepSpeed key.
OWNERS = {
    "train_batch_size": "run.global_batch_size",
    "train_micro_batch_size_per_gpu": "run.batch_size_train",
    "gradient_accumulation_steps": "run.accum_grad_iters",
    "gradient_clipping": "run.grad_clip",
    "bf16.enabled": "run.precision",
    "bfloat16.enabled": "run.precision",
    "fp16.enabled": "run.precision",
    "optimizer.params.lr": "run.init_lr",
    "optimizer.params.betas": "run.optimizer.betas",
    "optimizer.params.eps": "run.optimizer.eps",
    "optimizer.params.weight_decay": "run.weight_decay",
    "optimizer.params.max_grad_norm": "run.grad_clip",
}

# What to do instead of keys that never were, are gone, or would not reach our engine.
_INSTEAD = {
    "amp": "Apex AMP is gone from DeepSpeed; run.precision chooses the number format.",
    "elasticity": "Elastic training is gone from DeepSpeed; set global_batch_size or batch_size_train in run:.",
    "compression_training": "The compression library is gone from DeepSpeed; quantise the exported model instead.",
    "nebula": "Nebula is gone from DeepSpeed; run.save_every says when checkpoints are written.",
    "curriculum_learning": "Legacy curriculum learning is gone from DeepSpeed; run.seed decides the data order.",
    "fp8_training": "DeepSpeed never had this key and would ignore it; run.precision takes fp32, bf16 or fp16.",
    "fp8": "DeepSpeed never had this key and would ignore it; run.precision takes fp32, bf16 or fp16.",
    "scheduler": "The learning rate belongs to run: use run.lr_sched, init_lr, min_lr and warmup_steps.",
    "allgather_size": "DeepSpeed's name is zero_optimization.allgather_bucket_size.",
    "zero_optimization.mics_shard_size": "MiCS is gone from DeepSpeed; use zero_optimization.zero_hpz_partition_size.",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone from DeepSpeed; remove this key.",
    "zero_optimization.zeropp_loco_param": "LoCo is gone from DeepSpeed; zero_quantized_gradients works without it.",
    "zero_optimization.cpu_offload": "Write zero_optimization.offload_optimizer: {device: cpu}.",
    "zero_optimization.cpu_offload_param": "Write zero_optimization.offload_param: {device: cpu}.",
    "zero_optimization.cpu_offload_use_pin_memory": "Write pin_memory inside offload_optimizer or offload_param.",
    "checkpoint.save_interval": "DeepSpeed never had this key; run.save_every says when checkpoints are written.",
    "tensor_parallel": "Tensor parallelism is not supported by this runner yet; use ZeRO-3 for models that do not fit.",
    "expert_parallel": "Expert parallelism is not supported by this runner yet; use ZeRO-3 for models that do not fit.",
    "sequence_parallel_size": "Sequence parallelism is not supported by this runner yet.",
    "pipeline": "Pipeline parallelism is not supported by this runner yet; use ZeRO-3 for models that do not fit.",
    "checkpoint.strip_weights_keys": "DeepSpeed never had this key; remove it.",
}

# The training loop relies on these; another value would change the gradient or hide its norm.
_FIXED = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "zero_optimization.compute_grad_norm": True,
}
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_TYPE_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number",
               "str": "text", "list": "a list", "dict": "a mapping"}  # fmt: skip


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with whole numbers as integers, old names replaced and empty offload blocks left out.

    Raises:
        ConfigError: with one line for each unknown, removed, mistyped or impossible setting.
    """
    linter = _Linter(installed_schema())
    settings = linter.block(config, linter.schema.root, "")
    if not linter.findings:
        linter.combinations(settings)
    if linter.findings:
        raise ConfigError("\n".join(linter.findings))
    if "bfloat16" in settings:
        settings["bf16"] = {**settings.pop("bfloat16"), **(settings.get("bf16") or {})}
    zero = settings.get("zero_optimization", {})
    for name in [name for name, value in zero.items() if value is None]:
        del zero[name]
    return settings


class _Linter:
    """Collects findings while it copies the settings."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.findings: list[str] = []

    def _report(self, path: str, text: str) -> None:
        self.findings.append(f"{WHERE}.{path}: {text}".rstrip())

    def block(self, config: Mapping[str, Any], block: Key, prefix: str) -> dict[str, Any]:
        settings = {}
        for name, value in config.items():
            path = f"{prefix}{name}"
            if path in _INSTEAD or path in self.schema.removed:
                self._report(path, _INSTEAD.get(path) or self.schema.removed[path].strip())
            elif path == "optimizer":
                settings[name] = self._optimizer(value)
            elif name in block.keys:
                settings[name] = self._value(value, block.keys[name], path)
            elif block.is_open:
                settings[name] = copy.deepcopy(value)
            else:
                nearest = self._nearest(name, block)
                self._report(path, f"there is no such key in DeepSpeed {self.schema.version}. {nearest}")
        return settings

    def _nearest(self, name: str, block: Key) -> str:
        similar = did_you_mean(name, block.keys)
        elsewhere = [path for path, _ in self.schema.root.walk() if path.rpartition(".")[2] == name]
        if similar or elsewhere:
            return similar or f"There is {' or '.join(elsewhere[:3])}."
        return f"Known keys: {', '.join(sorted(block.keys))}." if len(block.keys) < 20 else ""

    def _value(self, value: Any, key: Key, path: str) -> Any:
        if value == "auto" and not key.takes_auto:
            owner = OWNERS.get(path)
            decides = f"{owner} decides this" if owner else "write a value, or DeepSpeed's default is used"
            text = "is filled in by the Trainer of transformers and by nothing here. Remove the key: "
            self._report(path, f'"auto" {text}{decides}.')
        elif path in _FIXED and value != _FIXED[path]:
            self._report(path, f"the training loop needs {_FIXED[path]!r}. Given: {value!r}. Remove the key.")
        elif key.keys and value is not None:
            if isinstance(value, Mapping):
                return self.block(value, key, f"{path}.")
            self._report(path, f"must be a mapping. Given: {value!r}.")
        elif not (value is None and key.nullable):
            return self._leaf(value, key, path)
        return value

    def _leaf(self, value: Any, key: Key, path: str) -> Any:
        if isinstance(value, float) and value.is_integer() and ("int" in key.types or key.choices):
            value = int(value)
        if key.choices:
            allowed = any(type(value) is type(choice) and value == choice for choice in key.choices)
            words = f"one of {', '.join(str(choice) for choice in key.choices)}"
        else:
            allowed = not key.types or any(_is_a(value, name) for name in key.types)
            words = " or ".join(_TYPE_WORDS[name] for name in sorted(key.types))
        if not allowed and value != "auto":
            number = ", not text in quotes" if _is_number_text(value) else ""
            self._report(path, f"must be {words}{number}. Given: {value!r}.")
        elif isinstance(value, (int, float)):
            for sign, limit in key.bounds:
                if not _COMPARE[sign](value, limit):
                    self._report(path, f"must be {sign} {limit:g}. Given: {value!r}.")
        return copy.deepcopy(value)

    def _optimizer(self, value: Any) -> Any:
        """Only what repeats `run:` may stand here, since the engine builds the optimizer from `run:`."""
        if not isinstance(value, Mapping):
            self._report("optimizer", f"must be a mapping. Given: {value!r}.")
            return value
        kind = str(value.get("type", "AdamW"))
        if kind.lower() not in {"adam", "adamw"}:
            one_bit = kind.lower().startswith(("onebit", "zeroone"))
            gone = "1-bit optimizers are gone from DeepSpeed; " if one_bit else ""
            self._report("optimizer.type", f"{gone}{ds_optimizer.CHOICES} Given: {kind!r}.")
        for name in sorted(value.keys() - {"type", "params"}):
            self._report(f"optimizer.{name}", "there is no such key. Known keys: type, params.")
        params = value.get("params") or {}
        if not isinstance(params, Mapping):
            self._report("optimizer.params", f"must be a mapping. Given: {params!r}.")
            return value
        for name, number in params.items():
            path = f"optimizer.params.{name}"
            if number == "auto":
                self._value(number, Key(), path)
            elif path not in OWNERS and not (name == "adam_w_mode" and number is True):
                self._report(path, "this has no effect: the optimizer is built from run.optimizer. Remove the key.")
        return copy.deepcopy(dict(value))

    def combinations(self, settings: Mapping[str, Any]) -> None:
        """What DeepSpeed refuses late, or ignores."""
        zero = settings.get("zero_optimization", {})
        stage = zero.get("stage", DEFAULT_ZERO_STAGE)
        for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
            device = (zero.get(name) or {}).get("device", "none")
            if device != "none" and stage < lowest:
                text = f"needs zero_optimization.stage {lowest} or more; the stage is {stage}."
                self._report(f"zero_optimization.{name}", text)
            if device == "nvme" and not zero[name].get("nvme_path"):
                self._report(f"zero_optimization.{name}.nvme_path", "this folder must be given for device: nvme.")
            elif device == "nvme" and stage < 3:
                self._report(f"zero_optimization.{name}.device", f"nvme needs stage 3; the stage is {stage}.")
        for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
            if int(zero.get(name, 0)) > (name == "zero_hpz_partition_size") and stage < 3:
                self._report(f"zero_optimization.{name}", f"ZeRO++ needs stage 3; the stage is {stage}.")
        for path, reason in ds_optimizer.refusals(zero):
            self._report(f"zero_optimization.{path}", reason)


def _is_a(value: Any, type_name: str) -> bool:
    if isinstance(value, bool):
        return type_name == "bool"
    classes: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "list": (list, tuple), "dict": Mapping}
    return type_name in classes and isinstance(value, classes[type_name])


def _is_number_text(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)
