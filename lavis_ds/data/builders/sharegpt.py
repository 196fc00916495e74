"""Datasets in the ShareGPT format, as LLaMA-Factory reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import ShareGPTConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import sharegpt


class ShareGPT(RecordsBuilder):
    """`conversations` and optionally `images`, `videos` and `system`; see `lavis_ds.data.formats.sharegpt`."""

    Config = ShareGPTConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return sharegpt.to_conversation(item, conversation_id=conversation_id, where=where, image_root=image_root)
