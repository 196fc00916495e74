"""COCO captions, and other datasets in their format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import CocoCaptionsConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import coco_captions
from lavis_ds.data.json_file import read_json
from lavis_ds.data.records import PackedItems, Records


class CocoCaptions(RecordsBuilder):
    """Files with `images` and `annotations`; see `lavis_ds.data.formats.coco_captions`."""

    Config = CocoCaptionsConfig
    config: CocoCaptionsConfig

    def records(self, split: str) -> Records:
        paths, samples = self.config.annotations[split], self.config.samples.get(split, "picture")

        def items() -> Iterator[dict[str, Any]]:
            for path in paths:
                yield from coco_captions.items(read_json(path), path, samples)

        return PackedItems(paths, ["coco_captions", samples], items)

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return coco_captions.to_conversation(
            item, conversation_id=conversation_id, where=where, image_root=image_root, prompt=self.config.prompt
        )
