"""What a dataset builder is: paths in, conversations out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lavis_ds.config.schema import DatasetConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.errors import ConfigError, did_you_mean


class DatasetBuilder(ABC):
    """Reads one dataset. Subclass, set `Config`, register with `@registry.register_builder("name")`.

    Args:
        name: the entry's name in `datasets:`; prefixes sample ids and metrics.
        config: its options, an instance of `Config`.
    """

    Config: ClassVar[type[DatasetConfig]] = DatasetConfig

    def __init__(self, name: str, config: DatasetConfig) -> None:
        self.name = name
        self.config = config

    @abstractmethod
    def splits(self) -> Sequence[str]:
        """Names of the splits that the options give files for."""

    @abstractmethod
    def build(self, split: str) -> Sequence[Conversation]:
        """The samples of a split, indexable, in an order that never changes for the same files.

        Raises:
            DataError: a file is missing or is not of the format; the message names file, item and field.
        """

    def check_split(self, split: str) -> None:
        """Raises:
        ConfigError: the dataset has no such split; those it has are named.
        """
        known = self.splits()
        if split not in known:
            raise ConfigError(
                f"the dataset {self.name!r} has no split {split!r}.",
                where=f"datasets.{self.name}",
                expected=f"one of {', '.join(known)}" if known else "`annotations` with a file for each split",
                hint=did_you_mean(split, known),
            )
