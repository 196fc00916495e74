"""Everything that can be refused before torch is even imported: settings, names, files, data, checkpoints."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lavis_ds import registry
from lavis_ds.config.schema import RootConfig, RunConfig
from lavis_ds.data import mixture
from lavis_ds.data.builders.base import ConversationStream
from lavis_ds.data.conversation import Conversation
from lavis_ds.engines import ds_config, nvme
from lavis_ds.errors import ConfigError, did_you_mean
from lavis_ds.runners import observers


@dataclass(frozen=True)
class Preflight:
    """What the checks found out.

    Attributes:
        plan: global batch, micro-batch and accumulation.
        splits: split -> dataset entry -> its samples; an entry without the split is left out.
        notices: what the user should know about the data.
    """

    plan: ds_config.BatchPlan
    splits: dict[str, dict[str, Sequence[Conversation]]]
    notices: tuple[str, ...] = ()


def check(config: RootConfig, *, world_size: int) -> Preflight:
    """Check what needs no model, and read the annotations of the splits that `run:` trains and evaluates on.

    Args:
        config: the checked configuration.
        world_size: ranks of the run.

    Raises:
        LavisError: the first thing that is wrong.
    """
    run = config.run
    observers.check(run.observers)
    plan = ds_config.batch_plan(run, world_size)
    if run.engine == "deepspeed":
        nvme.check(ds_config.derive(run, plan, data_parallel_size=world_size))
    _check_packages(run)
    _check_fp8(config, world_size)
    notices: list[str] = []
    splits = read(config, [*run.train_splits, *run.valid_splits, *run.test_splits], notices)
    _check_streams(config, splits)
    _check_rows(config, splits)
    return Preflight(plan, splits, tuple(notices))


def read(
    config: RootConfig, splits: Sequence[str], notices: list[str] | None = None
) -> dict[str, dict[str, Sequence[Conversation]]]:
    """The annotations of `splits`, once it is clear that the model's files exist: all that an evaluation needs.

    What the user should know about them is appended to `notices`.

    Raises:
        LavisError: the first thing that is wrong.
    """
    _check_paths(config)
    return {split: read_split(config, split, notices=notices) for split in dict.fromkeys(splits)}


def read_split(
    config: RootConfig, split: str, only: str | None = None, notices: list[str] | None = None
) -> dict[str, Any]:
    """Dataset entry -> its samples; an entry without the split is left out, one that is not `only` is empty.

    Raises:
        LavisError: no entry has the split, or an annotation file is wrong.
    """
    allowed = config.data.max_bad_fraction
    builders = {
        name: registry.get_builder_class(entry.builder)(name, entry, max_bad_fraction=allowed)
        for name, entry in config.datasets.items()
    }
    having = {name: builder for name, builder in builders.items() if split in builder.splits()}
    if not having:
        known = sorted({s for builder in builders.values() for s in builder.splits()})
        raise ConfigError(
            f"no dataset has a split {split!r}.",
            where="run",
            expected=f"one of {', '.join(known)}",
            hint=did_you_mean(split, known),
        )
    built = {name: builder.build(split) if only in (None, name) else [] for name, builder in having.items()}
    if notices is not None:
        notices += [line for builder in having.values() for line in builder.notices]
    return built


def _check_fp8(config: RootConfig, world_size: int) -> None:
    """Raises:
    ConfigError: a part has products in 8 bits with ZeRO-3, under which torchao keeps all layers' gathered weights.
    """
    keys = [f"model.{name}.fp8" for name, part in config.model if getattr(part, "fp8", "none") != "none"]
    if keys and ds_config.zero_stage(config.run, world_size) == 3:
        raise ConfigError(
            "products in 8 bits would keep every gathered weight until the backward pass, and ZeRO-3 save nothing.",
            where=keys[0],
            given="ZeRO-3",
            expected="stages 0 to 2",
            hint="Set it to none, or run.deepspeed_config.zero_optimization.stage to 2.",
        )


def _check_packages(run: RunConfig) -> None:
    """Raises:
    ConfigError: the optimizer needs a package that is not installed.
    """
    if run.optimizer.name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "8-bit AdamW needs bitsandbytes, which is not installed.",
            where="run.optimizer.name",
            given="adamw_8bit",
            hint="pip install 'lavis_ds[qlora]'",
        )


def _check_rows(config: RootConfig, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises:
    ConfigError: the mixture is not clear, or rows are planned by lengths that a processor draws anew every epoch.
    """
    names = dict.fromkeys(name for split in config.run.train_splits for name in splits[split])
    mixture.quotas(config.datasets, dict.fromkeys(names, 1), config.data)
    for name in names if config.data.batching != "padded" else ():
        if not config.datasets[name].text_processor.train.has_fixed_lengths:
            raise ConfigError(
                f"data.batching: {config.data.batching} plans by lengths, which this processor draws anew every epoch.",
                where=f"datasets.{name}.text_processor",
                hint="Leave `shuffle_turns` and `max_turns` out, or set data.batching to padded.",
            )


def _check_streams(config: RootConfig, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """A stream has no length and no order but its own, so a run over one can't do what needs them.

    Raises:
        ConfigError: it would have to.
    """
    run, entries = config.run, [(split, name) for split in splits for name in splits[split]]
    streams = [(split, name) for split, name in entries if isinstance(splits[split][name], ConversationStream)]
    if not streams:
        return
    split, name = streams[0]
    entry, training = config.datasets[name], [pair for pair in entries if pair[0] in run.train_splits]
    problems = {
        "a split that is evaluated": any(s in (*run.valid_splits, *run.test_splits) for s, _ in streams),
        "further training data beside it": len(training) > 1,
        "run.max_epoch (set run.max_steps)": run.max_steps is None,
        "`epoch` in run.save_every or run.eval_every": "epoch" in (run.save_every, run.eval_every),
        f"data.batching: {config.data.batching}": config.data.batching != "padded",
        "weight, repeat or max_samples": (entry.weight, entry.repeat, entry.max_samples) != (None, 1.0, None),
    }
    found = [what for what, is_so in problems.items() if is_so]
    if found:
        raise ConfigError(
            "this split is read as a stream, which has neither length nor index.",
            where=f"datasets.{name}",
            given="; ".join(found),
            hint=f"Index it instead (`stream: false`), or change that. The split is {split}.",
        )


def _check_paths(config: RootConfig) -> None:
    """Local folders that the model is read from exist. Hub ids (`Qwen/Qwen3-0.6B`) can't be judged here."""
    for key, value in _strings(config.model, "model"):
        leaf = key.rpartition(".")[2]
        is_path = leaf in {"path", "tokenizer", "pretrained", "finetuned", "weights"}
        if is_path and value.startswith(("/", "./", "../", "~")):
            if not Path(os.path.expanduser(value)).exists():
                raise ConfigError("there is no such file or folder.", where=key, given=value)
        elif leaf in {"path", "tokenizer"} and value.count("/") > 1 and not Path(value).exists():
            raise ConfigError(
                "there is no such folder, and it is no hub id (owner/name) either.", where=key, given=value
            )


def _strings(config: BaseModel, prefix: str) -> Iterator[tuple[str, str]]:
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _strings(value, f"{prefix}.{name}")
        elif isinstance(value, str):
            yield f"{prefix}.{name}", value
