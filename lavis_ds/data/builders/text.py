"""Datasets without pictures: plain text, or instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import TextConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import text


class PlainText(RecordsBuilder):
    """`text`, or `instruction` and `output`; see `lavis_ds.data.formats.text`."""

    Config = TextConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return text.to_conversation(item, conversation_id=conversation_id, where=where, image_root=image_root)
