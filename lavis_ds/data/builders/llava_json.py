"""Datasets in the format of LLaVA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import LlavaJsonConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import llava


class LlavaJson(RecordsBuilder):
    """`conversations` and optionally `image` or `video`; see `lavis_ds.data.formats.llava`."""

    Config = LlavaJsonConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return llava.to_conversation(item, conversation_id=conversation_id, where=where, image_root=image_root)
