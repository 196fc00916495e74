"""Datasets in WebDataset shards, read at any place through an index."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from lavis_ds.data.builders.base import ConversationStream, DatasetBuilder
from lavis_ds.data.builders.streamed_shards import StreamedShards
from lavis_ds.data.configs import WebDatasetConfig
from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn, Video
from lavis_ds.data.formats import captions, llava, messages, minigpt4qwen, sharegpt
from lavis_ds.data.shards.index import ShardIndex, index_shards
from lavis_ds.data.shards.members import PICTURES, VIDEOS, ending
from lavis_ds.data.shards.retry import GIB, ReadOptions
from lavis_ds.data.shards.urls import expand, shard_names
from lavis_ds.errors import DataError

_ITEMS: dict[str, tuple[ModuleType, str, str]] = {
    "llava": (llava, "image", "video"),
    "minigpt4qwen": (minigpt4qwen, "image", "video"),
    "sharegpt": (sharegpt, "images", "videos"),
    "messages": (messages, "", ""),
}
"""Format -> its module, and the fields that list an item's pictures and videos."""

_ROOT = "member:"
"""Stands for the folder that an item's relative paths start from."""

_MOST_PROCESSES = 8
_SHOWN = 5


class WebDataset(DatasetBuilder):
    """Captioned pictures, or items of another format with their pictures and videos; ids are `split/shard/key`."""

    Config = WebDatasetConfig
    config: WebDatasetConfig

    def __init__(self, name: str, config: WebDatasetConfig, *, max_bad_fraction: float = 0.0) -> None:
        super().__init__(name, config, max_bad_fraction=max_bad_fraction)
        self._indexes: dict[str, ShardIndex] = {}

    def splits(self) -> Sequence[str]:
        return list(self.config.annotations)

    def files(self, split: str) -> Sequence[str]:
        return [] if self.config.stream else self._index(split).files

    def build(self, split: str) -> Sequence[Conversation] | ConversationStream:
        """The samples of `split`, in the order of its shards. Members are read when a sample is asked for."""
        self.check_split(split)
        if self.config.stream:
            return self._stream(split)
        index = self._index(split)
        numbers = self._complete(index, split)
        return _ShardConversations(split, index, numbers, self._convert)

    @property
    def _convert(self) -> Callable[..., Conversation]:
        return partial(to_conversation, config=self.config)

    def _options(self) -> ReadOptions:
        return ReadOptions(self.config.retries, self.config.timeout_s, int(self.config.cache_gib * GIB))

    def _stream(self, split: str) -> ConversationStream:
        where = f"datasets.{self.name}.annotations.{split}"
        urls = expand(self.config.annotations[split], where)
        return StreamedShards(split, urls, self.config.shuffle_buffer, self._options(), self._convert)

    def _index(self, split: str) -> ShardIndex:
        if split not in self._indexes:
            config = self.config
            self._indexes[split] = index_shards(
                config.annotations[split],
                num_processes=min(_MOST_PROCESSES, len(os.sched_getaffinity(0))),
                progress=sys.stderr.isatty(),
                options=self._options(),
                where=f"datasets.{self.name}.annotations.{split}",
            )
        return self._indexes[split]

    def _complete(self, index: ShardIndex, split: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers of the samples that have all members their format needs."""
        lacks = np.zeros(len(index), np.bool_)
        for wanted in _needs(self.config):
            lacks |= ~index.has_member(wanted)
        if lacks.any():
            self._report(index, split, np.flatnonzero(lacks))
        return np.flatnonzero(~lacks)

    def _report(self, index: ShardIndex, split: str, incomplete: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        samples = [index[int(number)] for number in incomplete[:_SHOWN]]
        shown = "; ".join(f"{index.shards[s.shard].url}: {s.key} has {', '.join(s.spans)}" for s in samples)
        error = DataError(
            f"{len(incomplete)} of {len(index)} samples lack a member.",
            where=f"datasets.{self.name}.annotations.{split}",
            given=shown + ("; ..." if len(incomplete) > _SHOWN else ""),
            expected=_EXPECTED.get(self.config.format, f"a member .{self.config.json_ext} in each sample"),
            hint="Set `skip_incomplete: true` to leave them out.",
        )
        if not self.config.skip_incomplete or len(incomplete) == len(index):
            raise error
        self.notices.append(f"left out: {error}")


_EXPECTED = {"captions": "a picture or video, and a text or JSON member with the caption, in each sample"}


class _ShardConversations(Sequence[Conversation]):
    """Conversations made from the members of their shards when asked for."""

    def __init__(
        self, split: str, index: ShardIndex, numbers: np.ndarray[Any, np.dtype[np.int64]], convert: Callable[..., Any]
    ) -> None:
        self._split, self._index, self._numbers, self._convert = split, index, numbers, convert
        self._names = shard_names([shard.url for shard in index.shards])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        sample = self._index[int(self._numbers[range(len(self))[index]])]
        convert = partial(
            self._convert,
            key=sample.key,
            conversation_id=f"{self._split}/{self._names[sample.shard]}/{sample.key}",
            shard=self._index.shards[sample.shard].url,
        )
        return convert(read=partial(self._index.read, sample), exts=list(sample.spans))


def to_conversation(
    *,
    exts: Iterable[str],
    read: Callable[[Sequence[str]], Mapping[str, bytes]],
    key: str,
    conversation_id: str,
    shard: str,
    config: WebDatasetConfig,
) -> Conversation:
    """The conversation of one sample.

    Args:
        exts: extensions of its members.
        read: gives the content of those asked for.
        key: name of the sample in its shard.
        conversation_id: id of the result.
        shard: path or URL of the shard, for messages.
        config: format, prompt and extensions.

    Raises:
        DataError: a member can't be read or is not of the format, or the item names a picture that is not there.
    """
    where = f"{shard}: {key}"
    media = sorted((ext for ext in exts if _is_media(ext)), key=_numeric_order)
    annotation = _first(exts, [config.text_ext, config.json_ext] if config.format == "captions" else [config.json_ext])
    if annotation is None:
        raise DataError("the sample has no text or item.", where=where, given=", ".join(exts))
    content = read([annotation, *media])
    parts = {ext: _part(f"{os.path.basename(shard)}: {key}.{ext}", ext, content[ext]) for ext in media}
    text = _text(content[annotation], f"{where}.{annotation}")
    is_text = config.format == "captions" and annotation.lower() == config.text_ext.lower()
    item = {"caption": text.rstrip("\r\n")} if is_text else _item(text, f"{where}.{annotation}")
    if config.format == "captions":
        return _captioned(item, list(parts.values()), conversation_id, where, config.prompt)
    return _of_item(item, parts, key, conversation_id, where, config.format)


def _needs(config: WebDatasetConfig) -> list[Callable[[str], bool]]:
    """What each sample must have at least one member of."""
    if config.format == "captions":
        return [_is_media, lambda ext: _first([ext], [config.text_ext, config.json_ext]) is not None]
    return [lambda ext: _first([ext], [config.json_ext]) is not None]


def _is_media(ext: str) -> bool:
    return ending(ext) in PICTURES or ending(ext) in VIDEOS


def _first(exts: Iterable[str], wanted: Sequence[str]) -> str | None:
    """The first extension of `wanted` that is there, as it is spelled there."""
    spelled = {ext.lower(): ext for ext in exts}
    return next((spelled[ext.lower()] for ext in wanted if ext.lower() in spelled), None)


def _numeric_order(ext: str) -> list[tuple[int, int, str]]:
    """Sort key by which `10.jpg` comes after `2.jpg`."""
    pieces = re.split(r"(\d+)", ext)
    return [(1, int(piece), "") if piece.isdecimal() else (0, 0, piece) for piece in pieces]


def _part(name: str, ext: str, data: bytes) -> Image | Video:
    return Video(name, data) if ending(ext) in VIDEOS else Image(name, data)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8 ({error.reason}).", where=where) from error


def _item(text: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"this is no valid JSON: {error.msg}.", where=where, given=f"column {error.colno}") from None
    if not isinstance(item, dict):
        raise DataError("the item is no JSON object.", where=where, given=repr(item)[:80])
    return item


def _captioned(
    item: Mapping[str, Any], media: Sequence[Image | Video], conversation_id: str, where: str, prompt: str
) -> Conversation:
    if not media:
        raise DataError("the sample has no picture.", where=where)
    row = {"image": media[0].path, "caption": item.get("caption"), "text": item.get("text")}
    made = captions.to_conversation(row, conversation_id=conversation_id, where=where, image_root=_ROOT, prompt=prompt)
    asked = made.turns[0]
    return replace(made, turns=(Turn("user", (*media, *asked.content[1:])), *made.turns[1:]))


def _of_item(
    item: dict[str, Any],
    parts: Mapping[str, Image | Video],
    key: str,
    conversation_id: str,
    where: str,
    format_name: str,
) -> Conversation:
    module, *fields = _ITEMS[format_name]
    if parts and fields[0] and not any(item.get(field) for field in fields):
        for field, kind in zip(fields, (Image, Video), strict=True):
            item[field] = [f"{key}.{ext}" for ext, part in parts.items() if isinstance(part, kind)]
    made: Conversation = module.to_conversation(item, conversation_id=conversation_id, where=where, image_root=_ROOT)
    named = [part for turn in made.turns for part in turn.content if not isinstance(part, Text)]
    members: dict[Content, Content] = {part: _member(part, named, parts, key, where) for part in named}
    turns = [replace(turn, content=tuple(members.get(part, part) for part in turn.content)) for turn in made.turns]
    if parts and all(isinstance(part, Text) for turn in turns for part in turn.content):
        first = next(number for number, turn in enumerate(turns) if turn.role == "user")
        turns[first] = replace(turns[first], content=(*parts.values(), *turns[first].content))
    return replace(made, turns=tuple(turns), references=item.get("references", made.references))


def _member(
    part: Image | Video, named: Sequence[Content], parts: Mapping[str, Image | Video], key: str, where: str
) -> Image | Video:
    """The member that the path of `part` names: by its name or its extension, or the only one, for the only path."""
    if part.data is not None or part.path.startswith("data:"):
        return part
    path = part.path.removeprefix(f"{_ROOT}/")
    there = {ext: member for ext, member in parts.items() if type(member) is type(part)}
    for ext, member in there.items():
        if path in (f"{key}.{ext}", ext) or os.path.basename(path) == f"{os.path.basename(key)}.{ext}":
            return member
    if len(there) == 1 and all(other == part for other in named if type(other) is type(part)):
        return next(iter(there.values()))
    raise DataError(
        "the item names a picture or video that is not in the sample.",
        where=where,
        given=repr(path),
        expected=f"one of {', '.join(f'{key}.{ext}' for ext in there)}" if there else "a member with it",
    )
