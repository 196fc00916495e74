"""Datasets of pictures with a caption each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import CaptionsConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import captions


class Captions(RecordsBuilder):
    """`image` with `caption` or `text`; see `lavis_ds.data.formats.captions`."""

    Config = CaptionsConfig
    config: CaptionsConfig

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return captions.to_conversation(
            item, conversation_id=conversation_id, where=where, image_root=image_root, prompt=self.config.prompt
        )
