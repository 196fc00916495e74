"""Conversation -> `Sample` in ChatML.

The sequence is put together from ids. Special tokens come from here only: text is tokenised with special tokens split,
so a user who types `<|im_end|>` or `<image>` has typed text. Labels are made at the same time, never found again by
searching. Each piece of text is tokenised on its own, so a piece has the same ids wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_ds.batch import IGNORE_INDEX, PREFIX_SEGMENT, Sample
from lavis_ds.data.configs import ChatConfig
from lavis_ds.data.conversation import Content, Conversation, Image, Role, Text, Turn
from lavis_ds.data.processors.base import TextContext, TextProcessor
from lavis_ds.errors import ConfigError, DataError

_START, _END = "<|im_start|>", "<|im_end|>"
_SHORT, _MAX_REMEMBERED = 100, 10_000
"""Characters of a text, and number of texts, whose ids are remembered: a few MiB at most."""
_ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass
class _Tokens:
    """A stretch of the sequence under construction."""

    ids: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)
    image_index: list[int] = field(default_factory=list)
    num_images: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], *, is_target: bool = False) -> None:
        self.ids += ids
        self.is_target += [is_target] * len(ids)

    def add_image(self, filler: int, count: int) -> None:
        self.image_index += range(len(self), len(self) + count)
        self.add([filler] * count)
        self.num_images += 1

    def append(self, other: _Tokens) -> None:
        self.image_index += [len(self) + index for index in other.image_index]
        self.ids += other.ids
        self.is_target += other.is_target
        self.num_images += other.num_images


class Chat(TextProcessor):
    """ChatML: `<|im_start|>role`, newline, what is said, `<|im_end|>`, with a newline between turns.

    Targets are the ids of what the assistant says and of the `<|im_end|>` after it. A sample that is too long loses
    whole question-and-answer pairs from its end.

    With `turns: independent` a sample is a prefix (system message, user header, pictures) and one segment for each
    question. The prefix followed by any one segment is, in ids and positions, the sample of a conversation with that
    question alone.

    Raises:
        ConfigError: the tokenizer has no ChatML tokens.
    """

    Config = ChatConfig
    config: ChatConfig

    def __init__(self, config: ChatConfig, context: TextContext) -> None:
        super().__init__(config, context)
        self._tokenizer = context.tokenizer
        self._remembered: dict[str, Sequence[int]] = {}
        self._start, self._end = _special_id(self._tokenizer, _START), _special_id(self._tokenizer, _END)
        if {self._start, self._end} & set(self._encode(f"{_START}{_END}")):
            raise ConfigError(
                f"the tokenizer reads {_START} and {_END} in users' text as special tokens.",
                where="model.language.tokenizer",
                hint="Declare them as special tokens of the tokenizer (`extra_special_tokens`).",
            )
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, self._end)
        self._filler: int = next(i for i in ids if i is not None)
        self._newline = self._encode("\n")
        self._headers = {role: [self._start, *self._encode(f"{role}\n")] for role in _ROLES}

    def __call__(self, conversation: Conversation, images: Tensor, rng: np.random.Generator) -> Sample:
        self._check_images(conversation, images)
        is_independent = self.config.turns == "independent"
        prefix, segments = self._independent(conversation) if is_independent else self._in_turn(conversation)
        if self.config.shuffle_turns:
            segments = [segments[i] for i in rng.permutation(len(segments))[: self.config.max_turns]]
        segments = self._fitting(conversation, prefix, segments)
        if self.config.train_on == "last":
            for segment in segments[:-1]:
                segment.is_target = [False] * len(segment)
        sample = self._sample(conversation, [prefix, *segments], images)
        return _with_segments(sample, prefix, segments) if is_independent and len(segments) > 1 else sample

    def prompt(self, conversation: Conversation, images: Tensor) -> Sample:
        self._check_images(conversation, images)
        if conversation.turns and conversation.turns[-1].role == "assistant":
            conversation = replace(conversation, turns=conversation.turns[:-1])
        if self.config.turns == "independent":
            prefix, segments = self._independent(conversation)
            pieces = [prefix, segments[-1]]
        else:
            prefix, segments = self._in_turn(conversation)
            pieces = [prefix, *segments]
        answer = _Tokens()
        self._open(answer, "assistant")
        length = sum(map(len, pieces)) + len(answer)
        if length > self.context.max_length:
            raise self._too_long(conversation, "the prompt", length)
        sample = self._sample(conversation, [*pieces, answer], images, needs_target=False)
        return replace(sample, labels=torch.full_like(sample.labels, IGNORE_INDEX))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return (self._end,) if eos in (None, self._end) else (self._end, eos)

    def decode(self, ids: list[int]) -> str:
        answer = list(takewhile(lambda i: i not in self.stop_ids, ids))
        return str(self._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()

    def _encode(self, text: str) -> Sequence[int]:
        """Ids of plain text. Short texts (questions, answers, headers) come again and again, so they are remembered."""
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            if len(text) <= _SHORT and len(self._remembered) < _MAX_REMEMBERED:
                self._remembered[text] = ids
        return ids

    def _open(self, tokens: _Tokens, role: Role, *, is_first: bool = False) -> None:
        tokens.add([] if is_first else self._newline)
        tokens.add(self._headers[role])

    def _say(self, tokens: _Tokens, content: Iterable[Content], *, is_target: bool = False) -> None:
        for part in content:
            if isinstance(part, Text):
                tokens.add(self._encode(part.text), is_target=is_target)
            else:
                tokens.add_image(self._filler, self.context.tokens_per_image)

    def _turn(self, tokens: _Tokens, turn: Turn, *, is_first: bool = False) -> None:
        is_target = turn.role == "assistant" or self.config.train_on == "all"
        self._open(tokens, turn.role, is_first=is_first)
        self._say(tokens, turn.content, is_target=is_target)
        tokens.add([self._end], is_target=is_target)

    def _system(self, conversation: Conversation) -> tuple[_Tokens, tuple[Turn, ...]]:
        """The system message as tokens, perhaps none, and the turns after it."""
        turns = conversation.turns
        if self.config.system is not None and not (turns and turns[0].role == "system"):
            turns = (Turn("system", (Text(self.config.system),)), *turns)
        tokens = _Tokens()
        if turns and turns[0].role == "system":
            self._turn(tokens, turns[0], is_first=True)
            turns = turns[1:]
        return tokens, turns

    def _in_turn(self, conversation: Conversation) -> tuple[_Tokens, list[_Tokens]]:
        """The system message, and one stretch for each question with its answer."""
        prefix, turns = self._system(conversation)
        segments: list[_Tokens] = []
        for exchange in _exchanges(turns):
            segment = _Tokens()
            for number, turn in enumerate(exchange):
                self._turn(segment, turn, is_first=not (prefix.ids or segments or number))
            segments.append(segment)
        return prefix, segments

    def _independent(self, conversation: Conversation) -> tuple[_Tokens, list[_Tokens]]:
        """System message, user header and pictures; and one stretch for each question with its answer, if any."""
        prefix, turns = self._system(conversation)
        exchanges = _exchanges(turns)
        _check_independent(conversation, exchanges)
        pictures = tuple(takewhile(lambda part: isinstance(part, Image), exchanges[0][0].content))
        self._open(prefix, "user", is_first=not prefix.ids)
        self._say(prefix, pictures)
        segments = []
        for number, exchange in enumerate(exchanges):
            segment = _Tokens()
            self._say(segment, exchange[0].content[len(pictures) if number == 0 else 0 :])
            segment.add([self._end])
            for answer in exchange[1:]:
                self._turn(segment, answer)
            segments.append(segment)
        return prefix, segments

    def _fitting(self, conversation: Conversation, prefix: _Tokens, segments: list[_Tokens]) -> list[_Tokens]:
        """As many of `segments`, from the front, as `max_length` has room for; at least one."""
        lengths = len(prefix) + np.cumsum([len(segment) for segment in segments])
        count = int(np.searchsorted(lengths, self.context.max_length, side="right"))
        if segments and count == 0:
            raise self._too_long(conversation, "the first question with its answer", int(lengths[0]))
        return segments[:count]

    def _too_long(self, conversation: Conversation, what: str, length: int) -> DataError:
        return DataError(
            f"{what} is too long.",
            where=conversation.id,
            given=f"{length} tokens, of which {len(conversation.images)} picture(s) of {self.context.tokens_per_image}",
            expected=f"at most {self.context.max_length}",
            hint="Raise model.max_txt_len, or leave the sample out.",
        )

    def _check_images(self, conversation: Conversation, images: Tensor) -> None:
        places = len(conversation.images)
        if places != len(images):
            raise DataError(f"{len(images)} pictures were given for {places} places.", where=conversation.id)
        if len(images) and self.context.tokens_per_image == 0:
            raise DataError("the sample has pictures, but the model has no vision part.", where=conversation.id)

    def _sample(
        self, conversation: Conversation, pieces: list[_Tokens], images: Tensor, *, needs_target: bool = True
    ) -> Sample:
        tokens = _Tokens()
        for piece in pieces:
            tokens.append(piece)
        if needs_target and not any(tokens.is_target):
            raise DataError(
                "no token of the sample is a target.",
                where=conversation.id,
                given=f"turns by {', '.join(turn.role for turn in conversation.turns) or 'nobody'}",
                expected="an answer to learn",
            )
        input_ids = torch.tensor(tokens.ids)
        return Sample(
            id=conversation.id,
            input_ids=input_ids,
            labels=input_ids.masked_fill(~torch.tensor(tokens.is_target), IGNORE_INDEX),
            position_ids=torch.arange(len(tokens)),
            images=images[: tokens.num_images],
            image_index=torch.tensor(tokens.image_index, dtype=torch.int64),
            references=conversation.references,
        )


def _special_id(tokenizer: Any, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ConfigError(
            f"the tokenizer has no token {token}, which the processor `chat` writes around turns.",
            where="model.language.tokenizer",
            hint="Use a ChatML tokenizer (Qwen, SmolLM2, ...), or add the token to this one.",
        )
    return int(token_id)


def _exchanges(turns: Sequence[Turn]) -> list[tuple[Turn, ...]]:
    """`turns` cut after every assistant turn; the last stretch may have no answer."""
    ends = [i + 1 for i, turn in enumerate(turns) if turn.role == "assistant"]
    starts = [0, *ends]
    return [tuple(turns[start:end]) for start, end in zip(starts, [*ends, len(turns)], strict=True) if start < end]


def _check_independent(conversation: Conversation, exchanges: list[tuple[Turn, ...]]) -> None:
    roles = [turn.role for exchange in exchanges for turn in exchange]
    if not roles or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        raise DataError(
            "with `turns: independent` user and assistant must take turns.", where=conversation.id, given=f"{roles}"
        )
    questions = [exchange[0].content for exchange in exchanges]
    leading = len(list(takewhile(lambda part: isinstance(part, Image), questions[0])))
    if leading != len(conversation.images):
        raise DataError(
            "with `turns: independent` all pictures must stand first in the first question.",
            where=conversation.id,
            given=f"{leading} of {len(conversation.images)} picture(s) stand there",
            hint="Use `turns: conversation` for this dataset.",
        )


def _with_segments(sample: Sample, prefix: _Tokens, segments: list[_Tokens]) -> Sample:
    """`sample` with every segment numbered, and its positions counted on from the end of the prefix."""
    positions, numbers = [torch.arange(len(prefix))], [torch.full((len(prefix),), PREFIX_SEGMENT)]
    for number, segment in enumerate(segments, start=PREFIX_SEGMENT + 1):
        positions.append(len(prefix) + torch.arange(len(segment)))
        numbers.append(torch.full((len(segment),), number))
    return replace(sample, position_ids=torch.cat(positions), segment_ids=torch.cat(numbers))
