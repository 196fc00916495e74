"""Conversation -> `Sample`, in the tokenizer's chat template or in ChatML.

The sequence is put together from ids. Special tokens come from the template only: text is tokenised with special tokens
split, so a user who types `<|im_end|>` or `<image>` has typed text. Labels are made at the same time, never found again
by searching. Each piece of text is tokenised on its own, so a piece has the same ids wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_ds.batch import IGNORE_INDEX, PREFIX_SEGMENT, Sample
from lavis_ds.data.configs import ChatConfig
from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.processors.base import TextContext, TextProcessor
from lavis_ds.data.processors.layouts import Exchange, Independent, InTurn, Layout, Writer
from lavis_ds.data.processors.mrope import boxes, mrope_positions
from lavis_ds.data.processors.pictures import PictureWriter
from lavis_ds.data.processors.templates import ChatTemplate
from lavis_ds.data.processors.tokens import TextEncoder, Tokens
from lavis_ds.data.processors.views import Views, as_views
from lavis_ds.data.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS
from lavis_ds.errors import ConfigError, DataError


class Chat(TextProcessor):
    """Turns in a chat template.

    Targets are the ids of what the assistant says and of the special token that ends its turn. What a template writes
    by itself is none: headers, a default system message, Qwen3's empty `<think>` block before the last answer. A sample
    ends with the last turn's end; the line break that many templates have after it would be read by nothing.

    With `turns: independent` a sample is a prefix (system message, user header, pictures) and one segment for each
    question. The prefix followed by any one segment is, in ids and positions, the sample of a conversation with that
    question alone.

    Raises:
        ConfigError: there is no template that can be used, or the tokenizer reads its special tokens in plain text.
    """

    Config = ChatConfig
    config: ChatConfig

    def __init__(self, config: ChatConfig, context: TextContext) -> None:
        super().__init__(config, context)
        self._tokenizer = context.tokenizer
        encoder = TextEncoder(self._tokenizer)
        template = _template(config.template, self._tokenizer, encoder)
        if config.system is not None:
            template.frames(("system", "user", "assistant"))
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, template.end)
        filler = next(i for i in ids if i is not None)
        self._end = template.end
        pictures = PictureWriter(context, encoder, filler)
        self._writer = Writer(encoder, template, pictures, learns_all=config.train_on == "all")
        if context.merge_size is not None and config.turns == "independent":
            raise ConfigError(
                "independent questions can't stand side by side with positions in time, height and width.",
                where="text_processor.turns",
                hint="Set `turns: conversation` for this model.",
            )

    def __call__(
        self, conversation: Conversation, images: Sequence[Tensor | Views], rng: np.random.Generator
    ) -> Sample:
        pictures = [as_views(pixels) for pixels in images]
        layout = self._layout(conversation, pictures)
        exchanges = layout.exchanges
        if self.config.shuffle_turns:
            exchanges = [exchanges[i] for i in rng.permutation(len(exchanges))[: self.config.max_turns]]
        prefix, segments, num_dropped = self._fitting(layout, exchanges, conversation, pictures)
        if self.config.train_on == "last":
            for segment in segments[:-1]:
                segment.weights = [0.0] * len(segment)
        sample = sample_of(conversation, [prefix, *segments], pictures, self.context, num_dropped=num_dropped)
        is_split = self.config.turns == "independent" and len(segments) > 1
        return _with_segments(sample, prefix, segments) if is_split else sample

    def prompt(self, conversation: Conversation, images: Sequence[Tensor | Views]) -> Sample:
        """As the base class says: exactly what stands before the answer when it is learned."""
        pictures = [as_views(pixels) for pixels in images]
        if not (conversation.turns and conversation.turns[-1].role == "assistant"):
            conversation = replace(conversation, turns=(*conversation.turns, Turn("assistant", ())))
        layout = self._layout(conversation, pictures)
        asked = layout.exchanges[-1:] if self.config.turns == "independent" else layout.exchanges
        prefix, segments = layout.encode(asked, open_end=True)
        sample = sample_of(conversation, [prefix, *segments], pictures, self.context, needs_target=False)
        if len(sample.input_ids) > self.context.max_length:
            raise self._too_long("the prompt", len(sample.input_ids), conversation, pictures)
        return replace(sample, labels=torch.full_like(sample.labels, IGNORE_INDEX), target_weights=None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return (self._end,) if eos in (None, self._end) else (self._end, eos)

    def decode(self, ids: list[int]) -> str:
        answer = list(takewhile(lambda i: i not in self.stop_ids, ids))
        return str(self._tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()

    def _layout(self, conversation: Conversation, images: Sequence[Views]) -> Layout:
        self._check(conversation, images)
        turns = conversation.turns
        if self.config.system is not None and not (turns and turns[0].role == "system"):
            system = Turn("system", (Text(self.config.system),))
            conversation = replace(conversation, turns=(system, *turns))
        layout = Independent if self.config.turns == "independent" else InTurn
        return layout(self._writer, conversation, images)

    def _check(self, conversation: Conversation, images: Sequence[Views]) -> None:
        places = len(conversation.pictures)
        if places != len(images):
            raise DataError(f"{len(images)} pictures were given for {places} places.", where=conversation.id)
        if len(images) and self.context.tokens_per_image == 0:
            raise DataError("the sample has pictures, but the model has no vision part.", where=conversation.id)
        weights = [turn.weight for turn in conversation.turns]
        if not all(0 <= weight < math.inf for weight in weights):
            raise DataError(
                "the weights of its turns are wrong.", where=conversation.id, given=weights, expected=">= 0"
            )

    def _fitting(
        self, layout: Layout, exchanges: Sequence[Exchange], conversation: Conversation, images: Sequence[Views]
    ) -> tuple[Tokens, list[Tokens], int]:
        """What of the exchanges `max_length` has room for, and how many turns that leaves out or cuts."""
        limit, policy = self.context.max_length, self.config.too_long
        prefix, segments = layout.encode(exchanges)
        if len(prefix) + sum(map(len, segments)) <= limit:
            return prefix, segments, 0
        lengths = len(prefix) + np.cumsum([len(segment) for segment in segments], dtype=np.int64)
        count = int(np.searchsorted(lengths, limit, side="right"))
        if policy == "sample":
            raise self._too_long("the sample", int(lengths[-1]), conversation, images)
        # What is left is encoded anew, for a template may write the last answer in another way than those before it.
        for number in range(count + 1 if policy == "cut" else count, 0, -1):
            prefix, segments = layout.encode(exchanges[:number])
            num_dropped = sum(map(len, exchanges[number:]))
            excess = len(prefix) + sum(map(len, segments)) - limit
            if excess <= 0:
                return prefix, segments, num_dropped
            if policy == "cut" and excess < len(segments[-1]):
                num_cut = segments[-1].cut(len(segments[-1]) - excess)
                if any(segments[-1].weights):
                    return prefix, segments, num_dropped + num_cut
        raise self._too_long("the first question with its answer", int(lengths[0]), conversation, images)

    def _too_long(self, what: str, length: int, conversation: Conversation, images: Sequence[Views]) -> DataError:
        views = sum(map(len, images))
        in_views = f" in {views} views" if views != len(images) else ""
        return DataError(
            f"{what} is too long.",
            where=conversation.id,
            given=f"{length} tokens, of which {len(images)} picture(s){in_views} of {self.context.tokens_per_image}",
            expected=f"at most {self.context.max_length}",
            hint="Raise model.max_txt_len, or leave the sample out.",
        )


def _template(choice: str, tokenizer: Any, encoder: TextEncoder) -> ChatTemplate:
    """The template to use, once it is known to be safe."""
    own = getattr(tokenizer, "chat_template", None)
    if choice == "tokenizer" and own is None:
        raise ConfigError(
            "the tokenizer has no chat template.",
            where="text_processor.template",
            hint="Use `template: chatml`, or put a chat_template.jinja beside the tokenizer.",
        )
    if choice == "tokenizer" or (choice == "auto" and own is not None):
        template = ChatTemplate(tokenizer, None, encoder)
        _check_plain(tokenizer.convert_ids_to_tokens(sorted(template.special_ids)), tokenizer, encoder)
        return template
    _check_plain(SPECIAL_TOKENS[1:], tokenizer, encoder)
    return ChatTemplate(tokenizer, CHAT_TEMPLATE, encoder)


def _check_plain(special: Iterable[str], tokenizer: Any, encoder: TextEncoder) -> None:
    """Refuse tokenizers that lack the template's special tokens, or that give them to whoever types them."""
    for token in special:
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == tokenizer.unk_token_id:
            raise ConfigError(
                f"the tokenizer has no token {token}, which the processor `chat` writes around turns.",
                where="model.language.tokenizer",
                hint="Use a tokenizer with a chat template or with ChatML's tokens, or add them to this one.",
            )
        if token_id in encoder.text(token):
            raise ConfigError(
                f"the tokenizer reads {token} in users' text as special tokens.",
                where="model.language.tokenizer",
                hint="Declare it as a special token of the tokenizer (`extra_special_tokens`).",
            )


def sample_of(
    conversation: Conversation,
    pieces: Sequence[Tokens],
    images: Sequence[Views],
    context: TextContext,
    *,
    num_dropped: int = 0,
    needs_target: bool = True,
) -> Sample:
    """The sample of stretches that follow each other.

    Raises:
        DataError: none of its tokens is a target, and it needs one.
    """
    tokens = Tokens()
    for piece in pieces:
        tokens.append(piece)
    tokens.weights[:1] = [0.0] * len(tokens.weights[:1])  # nothing before the first token predicts it
    if needs_target and not any(tokens.weights):
        raise DataError(
            "no token of the sample is a target.",
            where=conversation.id,
            given=f"turns by {', '.join(turn.role for turn in conversation.turns) or 'nobody'}",
            expected="an answer to learn",
        )
    ids, weights = np.array(tokens.ids, np.int64), np.array(tokens.weights, np.float32)
    kept = list(images[: len(tokens.pictures)])
    return Sample(
        id=conversation.id,
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(np.where(weights > 0, ids, IGNORE_INDEX)),
        position_ids=_positions(tokens, kept, context),
        images=_joined([views.pixels for views in kept]),
        image_grids=_grids(kept) if context.merge_size is not None or any(views.grid for views in kept) else None,
        image_index=tokens.image_index,
        target_weights=torch.from_numpy(weights) if set(tokens.weights) - {0.0, 1.0} else None,
        num_dropped_turns=num_dropped,
        references=conversation.references,
    )


def _positions(tokens: Tokens, pictures: Sequence[Views], context: TextContext) -> Tensor:
    is_counted = any(views.grid is None for views in pictures)  # where tokens are counted, nobody asks for positions
    if context.merge_size is None or is_counted:
        return torch.arange(len(tokens))
    shown = [box for views in pictures for box in boxes(views, context.tokens_per_second)]
    return mrope_positions(len(tokens), tokens.runs, shown, context.merge_size)


def _grids(pictures: Sequence[Views]) -> Tensor:
    return torch.tensor([views.grid or (0, 0, 0) for views in pictures], dtype=torch.int64).view(-1, 3)


def _joined(pictures: Sequence[Tensor]) -> Tensor:
    if len(pictures) == 1:  # most samples: no copy
        return pictures[0]
    return torch.cat(list(pictures)) if pictures else torch.empty((0, 3, 0, 0), dtype=torch.uint8)


def _with_segments(sample: Sample, prefix: Tokens, segments: list[Tokens]) -> Sample:
    """`sample` with every segment numbered, and its positions counted on from the end of the prefix."""
    positions, numbers = [torch.arange(len(prefix))], [torch.full((len(prefix),), PREFIX_SEGMENT)]
    for number, segment in enumerate(segments, start=PREFIX_SEGMENT + 1):
        positions.append(len(prefix) + torch.arange(len(segment)))
        numbers.append(torch.full((len(segment),), number))
    return replace(sample, position_ids=torch.cat(positions), segment_ids=torch.cat(numbers))
