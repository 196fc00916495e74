"""What a dataset builder is: paths in, conversations out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from lavis_ds.config.schema import DatasetConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.errors import ConfigError, DataError, did_you_mean

Streamed = tuple[str, Conversation | DataError]
"""Id of a sample, and the sample or what is wrong with it."""


class Lane(Iterator[Streamed], ABC):
    """The part of a stream that one data-loading process reads. `next` ends with each epoch, then goes on."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the epoch that the next sample belongs to."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where it is, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: the state is of another stream or of another number of lanes.
        """


class ConversationStream(ABC):
    """A split that has no length and no index; a builder may give one in place of a sequence."""

    @abstractmethod
    def lane(self, seed: int, rank: int, world_size: int, worker: int, num_workers: int) -> Lane:
        """The part of one worker of one rank; all parts together are the whole."""


class DatasetBuilder(ABC):
    """Reads one dataset. Subclass, set `Config`, register with `@registry.register_builder("name")`.

    Args:
        name: the entry's name in `datasets:`; prefixes sample ids and metrics.
        config: its options, an instance of `Config`.

    Attributes:
        max_bad_fraction: share of a split's items that may be wrong; `data.max_bad_fraction` in a run.
        notices: what the user should know about the splits built so far.
    """

    Config: ClassVar[type[DatasetConfig]] = DatasetConfig

    def __init__(self, name: str, config: DatasetConfig, *, max_bad_fraction: float = 0.0) -> None:
        self.name = name
        self.config = config
        self.max_bad_fraction = max_bad_fraction
        self.notices: list[str] = []

    @abstractmethod
    def splits(self) -> Sequence[str]:
        """Names of the splits that the options give files for."""

    @abstractmethod
    def build(self, split: str) -> Sequence[Conversation] | ConversationStream:
        """The samples of a split, indexable, in an order that never changes for the same files; or a stream of them.

        Raises:
            DataError: a file is missing or is not of the format; the message names file, item and field.
        """

    def files(self, split: str) -> Sequence[str]:
        """The files that say what a split's samples are; token counts kept on disk are made anew when one changes."""
        return self.config.annotations.get(split, [])

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
