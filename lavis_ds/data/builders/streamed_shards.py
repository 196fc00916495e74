"""The conversations of WebDataset shards that are read from front to back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lavis_ds.data.builders.base import ConversationStream, Lane, Streamed
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.shards.retry import ReadOptions
from lavis_ds.data.shards.stream import ShardStream
from lavis_ds.data.shards.urls import shard_names
from lavis_ds.errors import DataError

Convert = Callable[..., Conversation]
"""`lavis_ds.data.builders.webdataset.to_conversation` with its configuration."""


class StreamedShards(ConversationStream):
    """A split in shards, without an index.

    Args:
        split: its name.
        urls: the shards.
        shuffle_buffer: samples held in memory by each worker to be shuffled.
        options: how to read shards that lie elsewhere.
        convert: members to conversation.
    """

    def __init__(
        self, split: str, urls: Sequence[str], shuffle_buffer: int, options: ReadOptions, convert: Convert
    ) -> None:
        self._split, self._urls, self._buffer = split, urls, shuffle_buffer
        self._options, self._convert = options, convert
        self._names = shard_names(urls)

    def lane(self, seed: int, rank: int, world_size: int, worker: int, num_workers: int) -> Lane:
        shards = ShardStream(
            self._urls,
            seed=seed,
            rank=rank,
            world_size=world_size,
            worker=worker,
            num_workers=num_workers,
            shuffle_buffer=self._buffer,
            options=self._options,
        )
        return _ShardLane(shards, self._split, self._names, self._convert)


class _ShardLane(Lane):
    def __init__(self, shards: ShardStream, split: str, names: Sequence[str], convert: Convert) -> None:
        self._shards, self._split, self._names, self._convert = shards, split, names, convert

    @property
    def epoch(self) -> int:
        return self._shards.epoch

    def __next__(self) -> Streamed:
        sample = next(self._shards)
        conversation_id = f"{self._split}/{self._names[sample.shard]}/{sample.key}"
        try:
            conversation = self._convert(
                exts=list(sample.members),
                read=lambda exts: {ext: sample.members[ext] for ext in exts},
                key=sample.key,
                conversation_id=conversation_id,
                shard=self._shards.urls[sample.shard],
            )
        except DataError as error:
            return conversation_id, error
        return conversation_id, conversation

    def state_dict(self) -> dict[str, Any]:
        return self._shards.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shards.load_state_dict(state)
