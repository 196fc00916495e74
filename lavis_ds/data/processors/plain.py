"""Conversation -> `Sample` without a chat template, for pre-training: pictures, text, end of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from lavis_ds.batch import IGNORE_INDEX, Sample
from lavis_ds.data.configs import PlainConfig
from lavis_ds.data.conversation import Conversation, Text
from lavis_ds.data.processors.base import TextContext, TextProcessor
from lavis_ds.data.processors.chat import sample_of
from lavis_ds.data.processors.pictures import PictureWriter
from lavis_ds.data.processors.tokens import TextEncoder, Tokens
from lavis_ds.data.processors.views import Views, as_views
from lavis_ds.errors import ConfigError, DataError


class Plain(TextProcessor):
    """All pictures, then what the assistant says, then the end-of-text token; what others say is left out.

    Every token of the text and the last one are targets. It is LLaVA's first stage, and plain text of documents. Where
    the tokenizer has a beginning-of-text token, a sample starts with it.

    Source: the conversation template `plain` of https://github.com/haotian-liu/LLaVA (llava/conversation.py).

    Raises:
        ConfigError: the tokenizer has no end-of-text token.
    """

    Config = PlainConfig
    config: PlainConfig

    def __init__(self, config: PlainConfig, context: TextContext) -> None:
        super().__init__(config, context)
        tokenizer = context.tokenizer
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token.", where="model.language.tokenizer")
        self._encoder = TextEncoder(tokenizer)
        self._first = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
        self._end = int(tokenizer.eos_token_id)
        self._writer = PictureWriter(context, self._encoder, self._end)

    def __call__(
        self, conversation: Conversation, images: Sequence[Tensor | Views], rng: np.random.Generator
    ) -> Sample:
        pictures = [as_views(pixels) for pixels in images]
        tokens = self._pictures(conversation, pictures)
        for turn in conversation.turns:
            if turn.role == "assistant":
                for part in turn.content:
                    if isinstance(part, Text):
                        tokens.add(self._encoder.text(part.text), turn.weight)
        tokens.add([self._end], 1.0)
        num_cut = self._cut(tokens, conversation)
        return sample_of(conversation, [tokens], pictures, self.context, num_dropped=num_cut)

    def prompt(self, conversation: Conversation, images: Sequence[Tensor | Views]) -> Sample:
        """As the base class says: the pictures alone."""
        pictures = [as_views(pixels) for pixels in images]
        tokens = self._pictures(conversation, pictures)
        if not tokens.ids:
            raise DataError("without pictures there is nothing to continue.", where=conversation.id)
        sample = sample_of(conversation, [tokens], pictures, self.context, needs_target=False)
        return replace(sample, labels=torch.full_like(sample.labels, IGNORE_INDEX))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._end,)

    def decode(self, ids: list[int]) -> str:
        text = self.context.tokenizer.decode(list(takewhile(lambda i: i != self._end, ids)), skip_special_tokens=True)
        return str(text).strip()

    def _pictures(self, conversation: Conversation, images: Sequence[Views]) -> Tokens:
        if len(images) and self.context.tokens_per_image == 0:
            raise DataError("the sample has pictures, but the model has no vision part.", where=conversation.id)
        tokens = Tokens()
        tokens.add(self._first)
        for views in images:
            self._writer.write(tokens, views)
        return tokens

    def _cut(self, tokens: Tokens, conversation: Conversation) -> int:
        """Keep what there is room for; 1 where that cuts the text.

        Raises:
            DataError: it does not fit, and may not be cut, or the pictures alone do not fit.
        """
        limit, length = self.context.max_length, len(tokens)
        if length <= limit:
            return 0
        num_pictures = len(tokens.pictures)
        if self.config.too_long == "cut":
            tokens.cut(limit)
        if len(tokens) > limit or len(tokens.pictures) < num_pictures:
            raise DataError(
                "the sample is too long.",
                where=conversation.id,
                given=f"{length} tokens, {num_pictures} picture(s) among them",
                expected=f"at most {limit}",
                hint="Raise model.max_txt_len, or leave the sample out.",
            )
        return 1
