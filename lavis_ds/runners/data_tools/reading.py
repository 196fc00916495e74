"""The annotations that a command looks at. Needs no torch, so that a mistake costs no start-up time."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lavis_ds import registry
from lavis_ds.config.load import load
from lavis_ds.config.schema import RootConfig
from lavis_ds.data.builders.base import ConversationStream, DatasetBuilder
from lavis_ds.data.conversation import Conversation
from lavis_ds.errors import ConfigError, DataError, did_you_mean
from lavis_ds.runners import preflight


@dataclass(frozen=True)
class Annotations:
    """A configuration with the samples of some of its splits.

    Attributes:
        config: the run.
        splits: split -> dataset entry -> its samples; where one entry was asked for, the others are empty.
        is_training: whether the run trains on all of these splits.
        dataset: the entry asked for.
    """

    config: RootConfig
    splits: Mapping[str, Mapping[str, Any]]
    is_training: bool
    dataset: str | None = None

    @property
    def streams(self) -> dict[str, ConversationStream]:
        """Those that have no length and no index: where they stand, and they."""
        entries = ((name, samples) for split in self.splits.values() for name, samples in split.items())
        return {name: samples for name, samples in entries if isinstance(samples, ConversationStream)}

    def require_indexed(self) -> Annotations:
        """These annotations.

        Raises:
            ConfigError: some are read as a stream.
        """
        for name in self.streams:
            raise ConfigError(
                "this split is read as a stream, which has neither length nor index.",
                where=f"datasets.{name}",
                hint="Set `stream: false` with --options.",
            )
        return self

    def with_first_of_streams(self, count: int) -> Annotations:
        """The same, with the first `count` samples of each stream in its place."""
        seed = self.config.run.seed
        splits = {
            split: {
                name: StreamStart(samples, seed, count) if isinstance(samples, ConversationStream) else samples
                for name, samples in entries.items()
            }
            for split, entries in self.splits.items()
        }
        return replace(self, splits=splits)


class StreamStart(Sequence[Conversation]):
    """The first samples of a stream, as one process alone would read it."""

    def __init__(self, stream: ConversationStream, seed: int, count: int) -> None:
        self._samples = [sample for _, sample in islice(stream.lane(seed, 0, 1, 0, 1), count)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self._samples[index]
        if isinstance(sample, DataError):
            raise sample
        return sample


def load_config(cfg: str, options: Sequence[str]) -> RootConfig:
    """The checked configuration; what was translated in it is told on standard error."""
    loaded = load(cfg, options)
    print("".join(f"{notice}\n" for notice in loaded.notices), end="", file=sys.stderr)
    return loaded.config


def read(config: RootConfig, split: str | None, dataset: str | None = None) -> Annotations:
    """The annotations of a split, or of all that the run trains on, of one dataset or of all.

    Raises:
        LavisError: there is no such split or dataset, or an annotation file is wrong.
    """
    splits = [split] if split else config.run.train_splits
    if dataset is not None:
        having = builder(config, dataset)
        if not set(splits) & set(having.splits()):
            having.check_split(splits[0])
    notices: list[str] = []
    found = {name: preflight.read_split(config, name, dataset, notices) for name in splits}
    print("".join(f"{notice}\n" for notice in notices), end="", file=sys.stderr)
    return Annotations(config, found, set(splits) <= set(config.run.train_splits), dataset)


def builder(config: RootConfig, dataset: str) -> DatasetBuilder:
    """The builder of a dataset entry.

    Raises:
        ConfigError: there is no such entry.
    """
    if dataset not in config.datasets:
        raise ConfigError(
            "there is no such dataset.",
            where="--dataset",
            given=dataset,
            expected=f"one of {', '.join(config.datasets)}",
            hint=did_you_mean(dataset, config.datasets),
        )
    entry = config.datasets[dataset]
    builder_class = registry.get_builder_class(entry.builder)
    made: DatasetBuilder = builder_class(dataset, entry, max_bad_fraction=config.data.max_bad_fraction)
    return made
