"""What builders of JSON annotation files share: files in, checked and compact conversations out."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.records import JsonRecords, read_items
from lavis_ds.errors import DataError


class JsonFilesBuilder(DatasetBuilder):
    """Builder of a dataset whose splits are JSON or JSON-lines files, with pictures below `image_root`."""

    @abstractmethod
    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        """The conversation of one item; raises DataError with `where` and the field."""

    def splits(self) -> Sequence[str]:
        return list(self.config.annotations)

    def build(self, split: str) -> Sequence[Conversation]:
        """The samples of `split`, in the order of its files. All items are checked now, so none ends a run later."""
        self.check_split(split)
        root = self.config.image_root
        if root is not None and not os.path.isdir(root):
            raise DataError("there is no such folder.", where=f"datasets.{self.name}.image_root", given=root)
        conversations = _JsonConversations(self, split)
        conversations.records = JsonRecords(self._checked(conversations, self.config.annotations[split]))
        return conversations

    def _checked(self, conversations: _JsonConversations, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
        index = 0
        for path in paths:
            for where, item in read_items(path):
                conversations.convert(item, index, where)
                yield item
                index += 1


class _JsonConversations(Sequence[Conversation]):
    """Conversations made from their records when asked for."""

    def __init__(self, builder: JsonFilesBuilder, split: str) -> None:
        self._builder, self._split = builder, split
        self.records = JsonRecords(())

    def convert(self, item: Mapping[str, Any], index: int, where: str) -> Conversation:
        own_id = item.get("id")
        named = "" if own_id is None else f":{own_id}"
        return self._builder.to_conversation(
            item,
            conversation_id=f"{self._split}/{index}{named}",
            where=where if own_id is None else f"{where} (id {own_id})",
            image_root=self._builder.config.image_root,
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.convert(self.records[index], index, f"datasets.{self._builder.name}.{self._split}: item {index}")
