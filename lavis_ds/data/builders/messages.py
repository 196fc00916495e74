"""Datasets of chat messages, as OpenAI and Qwen write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import MessagesConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import messages


class Messages(RecordsBuilder):
    """`messages` with roles and contents; see `lavis_ds.data.formats.messages`."""

    Config = MessagesConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return messages.to_conversation(item, conversation_id=conversation_id, where=where, image_root=image_root)
