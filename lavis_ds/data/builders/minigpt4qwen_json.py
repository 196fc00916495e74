"""Datasets in the format of MiniGPT4Qwen and MPP-LLaVA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import MiniGPT4QwenJsonConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import minigpt4qwen


class MiniGPT4QwenJson(RecordsBuilder):
    """`instruction`, `output` and optionally `image` or `video`; see `lavis_ds.data.formats.minigpt4qwen`."""

    Config = MiniGPT4QwenJsonConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return minigpt4qwen.to_conversation(item, conversation_id=conversation_id, where=where, image_root=image_root)
