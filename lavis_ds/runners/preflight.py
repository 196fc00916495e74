"""Everything that can be refused before torch is even imported: settings, names, files, data, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from lavis_ds import registry
from lavis_ds.config.schema import RootConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.engines import ds_config
from lavis_ds.errors import ConfigError, did_you_mean
from lavis_ds.runners import observers


@dataclass(frozen=True)
class Preflight:
    """What the checks found out.

    Attributes:
        plan: global batch, micro-batch and accumulation.
        splits: split -> dataset entry -> its samples; an entry without the split is left out.
    """

    plan: ds_config.BatchPlan
    splits: dict[str, dict[str, Sequence[Conversation]]]


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
        ds_config.derive(run, plan, data_parallel_size=world_size)
    return Preflight(plan, read(config, [*run.train_splits, *run.valid_splits, *run.test_splits]))


def read(config: RootConfig, splits: Sequence[str]) -> dict[str, dict[str, Sequence[Conversation]]]:
    """The annotations of `splits`, once it is clear that the model's files exist: all that an evaluation needs.

    Raises:
        LavisError: the first thing that is wrong.
    """
    _check_paths(config)
    return {split: _read_split(config, split) for split in dict.fromkeys(splits)}


def _read_split(config: RootConfig, split: str) -> dict[str, Sequence[Conversation]]:
    builders = {name: registry.get_builder_class(entry.builder)(name, entry) for name, entry in config.datasets.items()}
    having = {name: builder for name, builder in builders.items() if split in builder.splits()}
    if not having:
        known = sorted({s for builder in builders.values() for s in builder.splits()})
        raise ConfigError(
            f"no dataset has a split {split!r}.",
            where="run",
            expected=f"one of {', '.join(known)}",
            hint=did_you_mean(split, known),
        )
    return {name: builder.build(split) for name, builder in having.items()}


def _check_paths(config: RootConfig) -> None:
    """Local folders that the model is read from exist. Hub ids (`Qwen/Qwen3-0.6B`) can't be judged here."""
    for key, value in _strings(config.model, "model"):
        leaf = key.rpartition(".")[2]
        if leaf in {"path", "tokenizer", "pretrained", "weights"} and value.startswith(("/", "./", "../", "~")):
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
