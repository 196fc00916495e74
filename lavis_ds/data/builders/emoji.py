"""Emoji pictures in several drawing styles, with their names.

Source: https://github.com/iamcal/emoji-data (npm emoji-datasource-google, emoji-datasource-twitter): `emoji.json`, and
`img/<style>/64/<image>` for every style.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lavis_ds.data.builders.base import DatasetBuilder
from lavis_ds.data.configs import EmojiConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.formats.fields import text_field
from lavis_ds.data.records import read_items
from lavis_ds.errors import ConfigError, DataError


class Emoji(DatasetBuilder):
    """One conversation a picture: the question, and the emoji's name in lower case.

    Only emoji that all styles of all splits draw are used, so that a style held out for evaluation asks for names that
    were learned.
    """

    Config = EmojiConfig
    config: EmojiConfig

    def splits(self) -> Sequence[str]:
        return list(self.config.styles)

    def build(self, split: str) -> Sequence[Conversation]:
        self.check_split(split)
        folders = {style: self._folder(style) for style in self.config.styles[split]}
        emoji = self._emoji()
        return [self._conversation(split, style, folder, item) for style, folder in folders.items() for item in emoji]

    def _folder(self, style: str) -> str:
        candidates = [os.path.join(self.config.root, style), os.path.join(self.config.root, "img", style, "64")]
        for folder in candidates:
            if os.path.isdir(folder):
                return folder
        raise ConfigError(
            f"there are no pictures of the style {style!r}.",
            where=f"datasets.{self.name}.styles",
            expected=f"the folder {' or '.join(candidates)}",
            hint=f"Unpack npm's emoji-datasource-{style} there.",
        )

    def _emoji(self) -> Sequence[Mapping[str, str]]:
        path = os.path.join(self.config.root, "emoji.json")
        styles = {style for names in self.config.styles.values() for style in names}
        fields = ("name", "short_name", "image", "category")
        emoji = [
            {field: text_field(item.get(field), field, where) for field in fields}
            for where, item in read_items(path)
            if all(_has(item, style) for style in styles)
        ]
        if not emoji:
            raise DataError(f"no emoji is drawn in all of the styles {', '.join(sorted(styles))}.", where=path)
        return emoji[: self.config.max_emoji]

    def _conversation(self, split: str, style: str, folder: str, item: Mapping[str, str]) -> Conversation:
        answer = item["name"].lower()
        image = Image(os.path.join(folder, item["image"]))
        turns = (Turn("user", (image, Text(self.config.question))), Turn("assistant", (Text(answer),)))
        references = {"answer": answer, "question_type": item["category"]}
        return Conversation(f"{split}/{style}/{item['short_name']}", turns, references)


def _has(item: Mapping[str, Any], style: str) -> bool:
    """Whether emoji.json says that the style has a picture; files of other origin do not say, and then all have one."""
    return bool(item.get(f"has_img_{style}", True))
