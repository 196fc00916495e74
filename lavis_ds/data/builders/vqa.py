"""VQA v2, and other datasets of questions with short answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.configs import VQAFilesConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.formats import vqa
from lavis_ds.data.json_file import read_json, starts_with_object
from lavis_ds.data.records import PackedItems, Records
from lavis_ds.errors import ConfigError, DataError


class VQAFiles(RecordsBuilder):
    """Rows, or VQA v2's pair of files for each split; see `lavis_ds.data.formats.vqa`."""

    Config = VQAFilesConfig
    config: VQAFilesConfig

    def records(self, split: str) -> Records:
        paths = self.config.annotations[split]
        if not (paths[0].lower().endswith(".json") and starts_with_object(paths[0])):
            return super().records(split)
        pattern = self.config.image_file
        image_file = pattern.get(split) if isinstance(pattern, dict) else pattern
        if image_file is None:
            raise ConfigError(
                "files of VQA v2 say which picture only by its number.",
                where=f"datasets.{self.name}.image_file",
                expected=f'how the pictures of {split!r} are called, such as "COCO_{split}2014_{{image_id:012d}}.jpg"',
            )
        return PackedItems(paths, ["vqa", image_file], lambda: _joined(paths, image_file))

    def to_conversation(
        self, item: Mapping[str, Any], *, conversation_id: str, where: str, image_root: str | None
    ) -> Conversation:
        return vqa.to_conversation(
            item, conversation_id=conversation_id, where=where, image_root=image_root, prompt=self.config.prompt
        )


def _joined(paths: list[str], image_file: str) -> Iterator[dict[str, Any]]:
    """The files tell by their content which of them is which."""
    found = {
        kind: (path, document)
        for path, document in ((path, read_json(path)) for path in paths)
        for kind in ("questions", "annotations")
        if isinstance(document, dict) and kind in document
    }
    if len(paths) > 2 or "questions" not in found or len(found) != len(paths):
        raise DataError(
            "this is no pair of VQA v2 files.",
            where=", ".join(paths),
            given=f"file(s) with {' and '.join(found) or 'neither `questions` nor `annotations`'}",
            expected="a file with `questions` and, unless the answers are not public, one with `annotations`",
        )
    questions_path, questions = found["questions"]
    annotations_path, annotations = found.get("annotations", ("", None))
    yield from vqa.joined(
        questions,
        annotations,
        questions_path=questions_path,
        annotations_path=annotations_path,
        image_file=image_file,
    )
