"""What builders of annotation files share: files of any container in, checked conversations out."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lavis_ds import __version__
from lavis_ds.config.schema import DatasetConfig
from lavis_ds.data import cache
from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.records import Records, check_file, open_records
from lavis_ds.errors import ConfigError, DataError, listed

_SHOWN = 5
"""Wrong items that a message shows."""
_IRRELEVANT = set(DatasetConfig.model_fields) - {"image_root"}
"""Options that no item becomes right or wrong by."""


class RecordsBuilder(DatasetBuilder):
    """Builder of a dataset whose splits are JSON, JSON-lines, Parquet or Arrow files, with pictures below `image_root`.

    A subclass says what one item is, in `to_conversation`.
    """

    @abstractmethod
    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        """The conversation of one item; raises DataError with `where` and the field."""

    def splits(self) -> Sequence[str]:
        return list(self.config.annotations)

    def records(self, split: str) -> Records:
        """The items of a split; overridden where they are joined from several files."""
        return open_records(self.config.annotations[split])

    def build(self, split: str) -> Sequence[Conversation]:
        """The samples of `split`, in the order of its files.

        All items are checked before any is used, once for the same files and options. A few wrong ones are left out
        when their turn comes, more than `max_bad_fraction` are refused.
        """
        self.check_split(split)
        root = self.config.image_root
        if root is not None and not os.path.isdir(root):
            raise DataError("there is no such folder.", where=f"datasets.{self.name}.image_root", given=root)
        if not self.config.annotations[split]:
            raise ConfigError("the list of files is empty.", where=f"datasets.{self.name}.annotations.{split}")
        for path in self.config.annotations[split]:
            check_file(path)
        conversations = RecordConversations(self, split, self.records(split))
        wrong = cache.arrays("checked", self._check_key(split), lambda: _check(conversations))["wrong"].tolist()
        if len(wrong) > self.max_bad_fraction * len(conversations):
            error = _error(conversations, wrong[0]) if len(wrong) == 1 else None
            raise error or DataError(_describe(conversations, wrong))
        if wrong:
            self.notices.append(f"datasets.{self.name}: left out: {_describe(conversations, wrong)}")
        return conversations

    def _check_key(self, split: str) -> str:
        """Changes with all that decides whether an item is right: the files, the options and the code."""
        kind = type(self)
        code = getattr(sys.modules[kind.__module__], "__file__", None)
        return cache.fingerprint(
            ["wrong items", __version__, kind.__module__, kind.__qualname__, cache.stamp([code] if code else [])],
            [split, self.config.model_dump(mode="json", exclude=_IRRELEVANT), cache.stamp(self.files(split))],
        )


class RecordConversations(Sequence[Conversation]):
    """Conversations made from their records when asked for."""

    def __init__(self, builder: RecordsBuilder, split: str, records: Records) -> None:
        self._builder, self._split, self._records = builder, split, records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        item, where = self._records[index], self._records.where(index)
        own_id = item.get("id")
        return self._builder.to_conversation(
            item,
            conversation_id=f"{self._split}/{index}" + ("" if own_id is None else f":{own_id}"),
            where=where if own_id is None else f"{where} (id {own_id})",
            image_root=self._builder.config.image_root,
        )


def _check(conversations: RecordConversations) -> cache.Arrays:
    """Numbers of the items that are wrong."""
    return {"wrong": np.array([i for i in range(len(conversations)) if _error(conversations, i)], np.int64)}


def _error(conversations: RecordConversations, index: int) -> DataError | None:
    try:
        conversations[index]
    except DataError as error:
        return error
    return None


def _describe(conversations: RecordConversations, wrong: Sequence[int]) -> str:
    """How many items are wrong, and why the first ones are."""
    shown = [str(_error(conversations, index)) for index in wrong[:_SHOWN]]
    return f"{len(wrong)} of {len(conversations)} items are wrong:{listed(shown, len(wrong))}"
