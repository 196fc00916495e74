"""Where the turns of a conversation stand in a sample: one after the other, or every question beside the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from lavis_ds.data.conversation import Content, Conversation, Image, Role, Text, Turn
from lavis_ds.data.processors.pictures import PictureWriter
from lavis_ds.data.processors.templates import ChatTemplate, Frame
from lavis_ds.data.processors.tokens import TextEncoder, Tokens
from lavis_ds.data.processors.views import Views
from lavis_ds.errors import ConfigError, DataError

Exchange = tuple[Turn, ...]
"""Turns up to and with an answer; the last of a conversation may have none."""


@dataclass(frozen=True)
class Writer:
    """Turns -> ids.

    Attributes:
        encoder: text to ids.
        template: what stands around turns.
        pictures: what stands for pictures and videos.
        learns_all: whether what users say is a target too.
    """

    encoder: TextEncoder
    template: ChatTemplate
    pictures: PictureWriter
    learns_all: bool

    def frames(self, sample_id: str, turns: Iterable[Turn]) -> tuple[Frame, ...]:
        """Raises:
        DataError: the template does not take turns in this order.
        """
        roles: tuple[Role, ...] = tuple(turn.role for turn in turns)
        try:
            return self.template.frames(roles)
        except ConfigError as error:
            raise DataError(
                error.what,
                where=sample_id,
                given=f"turns by {', '.join(roles) or 'nobody'}",
                hint="Leave the sample out, or change the order of its turns.",
            ) from error

    def turn(self, tokens: Tokens, turn: Turn, frame: Frame, pictures: Iterator[Views]) -> None:
        """One turn with what the template writes around it.

        Args:
            tokens: what it is added to.
            turn: what is said.
            frame: what stands around it.
            pictures: pictures and videos to come.
        """
        weight = turn.weight if turn.role == "assistant" or self.learns_all else 0.0
        tokens.add(frame.before)
        self.say(tokens, frame.fit(turn.content), weight, pictures)
        tokens.add(frame.after, weight)
        tokens.end_turn()

    def say(self, tokens: Tokens, content: Iterable[Content], weight: float, pictures: Iterator[Views]) -> None:
        for part in content:
            if isinstance(part, Text):
                tokens.add(self.encoder.text(part.text), weight)
            else:
                self.pictures.write(tokens, next(pictures))


class Layout(ABC):
    """One conversation, ready to be encoded as a whole or in part.

    Attributes:
        exchanges: what it consists of.
    """

    exchanges: list[Exchange]

    @abstractmethod
    def encode(self, exchanges: Sequence[Exchange], *, open_end: bool = False) -> tuple[Tokens, list[Tokens]]:
        """What stands before all exchanges, and a stretch for each. `open_end` leaves out what the last turn says."""


class InTurn(Layout):
    """Turn after turn; nothing stands before all of them."""

    def __init__(self, writer: Writer, conversation: Conversation, pictures: Sequence[Views]) -> None:
        self._writer, self._id, self._views = writer, conversation.id, pictures
        self.exchanges = _exchanges(conversation.turns)

    def encode(self, exchanges: Sequence[Exchange], *, open_end: bool = False) -> tuple[Tokens, list[Tokens]]:
        frames = iter(self._writer.frames(self._id, (turn for exchange in exchanges for turn in exchange)))
        pictures = iter(self._views)
        segments: list[Tokens] = []
        for number, exchange in enumerate(exchanges, start=1):
            segment = Tokens()
            is_open = open_end and number == len(exchanges)
            for turn in exchange[:-1] if is_open else exchange:
                self._writer.turn(segment, turn, next(frames), pictures)
            if is_open:
                segment.add(next(frames).before)
            segments.append(segment)
        return Tokens(), segments


class Independent(Layout):
    """System message, user header and pictures before all questions; a stretch for each question with its answer.

    What stands before them and any one of them are, in ids, the conversation with that question alone.

    Raises:
        DataError: pictures stand elsewhere, or user and assistant do not take turns.
    """

    def __init__(self, writer: Writer, conversation: Conversation, pictures: Sequence[Views]) -> None:
        self._writer, self._id, self._views = writer, conversation.id, pictures
        turns = conversation.turns
        self._system = turns[:1] if turns and turns[0].role == "system" else ()
        (question, *answer), *others = _checked(conversation, _exchanges(turns[len(self._system) :]))
        self._pictures = question.content[: len(pictures)]
        self.exchanges = [(replace(question, content=question.content[len(pictures) :]), *answer), *others]

    def encode(self, exchanges: Sequence[Exchange], *, open_end: bool = False) -> tuple[Tokens, list[Tokens]]:
        turns = (*self._system, Turn("user", ()), Turn("assistant", ()))
        *systems, asked, answered = self._writer.frames(self._id, turns)
        pictures, prefix = iter(self._views), Tokens()
        segments: list[Tokens] = []
        for turn, frame in zip(self._system, systems, strict=True):
            self._writer.turn(prefix, turn, frame, pictures)
        prefix.add(asked.before)
        for question, *answers in exchanges:
            content = asked.fit((*self._pictures, *question.content))
            shared = len(content) - len(question.content) if self._pictures else 0
            if not segments:
                self._writer.say(prefix, content[:shared], 0.0, pictures)
            segments.append(self._segment(content[shared:], asked, answered, answers, open_end=open_end))
        return prefix, segments

    def _segment(
        self, question: Sequence[Content], asked: Frame, answered: Frame, answers: Sequence[Turn], *, open_end: bool
    ) -> Tokens:
        segment = Tokens()
        self._writer.say(segment, question, 0.0, iter(()))
        segment.add(asked.after)
        segment.end_turn()
        if open_end:
            segment.add(answered.before)
        else:
            for answer in answers:
                self._writer.turn(segment, answer, answered, iter(()))
        return segment


def _exchanges(turns: Sequence[Turn]) -> list[Exchange]:
    """`turns` cut after every assistant turn; the last stretch may have no answer."""
    ends = [i + 1 for i, turn in enumerate(turns) if turn.role == "assistant"]
    starts = [0, *ends]
    return [tuple(turns[start:end]) for start, end in zip(starts, [*ends, len(turns)], strict=True) if start < end]


def _checked(conversation: Conversation, exchanges: list[Exchange]) -> list[Exchange]:
    roles = [turn.role for exchange in exchanges for turn in exchange]
    if not roles or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        raise DataError(
            "with `turns: independent` user and assistant must take turns.", where=conversation.id, given=f"{roles}"
        )
    leading = len(list(takewhile(lambda part: isinstance(part, Image), exchanges[0][0].content)))
    if leading != len(conversation.images):
        raise DataError(
            "with `turns: independent` all pictures must stand first in the first question.",
            where=conversation.id,
            given=f"{leading} of {len(conversation.images)} picture(s) stand there",
            hint="Use `turns: conversation` for this dataset.",
        )
    return exchanges
