"""What a chat template writes around turns, as token ids.

A template is rendered once for each sequence of roles, with a mark in place of what each turn says, and the rendering
is cut at the marks. So special tokens come from the template only, and where a turn begins and ends is known.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lavis_ds.data.conversation import Content, Role, Text
from lavis_ds.data.processors.tokens import TextEncoder
from lavis_ds.errors import ConfigError

_MAX_REMEMBERED = 10_000
_LEFT = (("\n\t", ""), ("\t", "\n"), ("", string.whitespace))
_RIGHT = (("\t\n", ""), ("\t", "\n"), ("", string.whitespace))
"""What may remain of white space at either end of a turn, and the characters that the template then strips."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around one turn.

    Attributes:
        before: ids between the turn before and this one's content.
        after: ids from the end of the content up to the first special token, which ends the turn; none without one.
        space: blanks before the content, not in `before`: tokenizers have them in one token with the first word.
        lstrip: characters that the template strips from the content's left end.
        rstrip: the same on the right.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    space: str
    lstrip: str
    rstrip: str

    def fit(self, content: Sequence[Content]) -> Sequence[Content]:
        """The content as the template would write it."""
        if not (self.space or self.lstrip or self.rstrip):
            return content
        parts = list(content)
        _strip(parts, range(len(parts)), lambda text: text.lstrip(self.lstrip))
        _strip(parts, reversed(range(len(parts))), lambda text: text.rstrip(self.rstrip))
        if self.space and parts and isinstance(parts[0], Text):
            return [Text(self.space + parts[0].text), *parts[1:]]
        return [Text(self.space), *parts] if self.space else parts


class ChatTemplate:
    """Sequences of roles -> a `Frame` for each turn.

    Attributes:
        end: id of the special token that ends an answer.
        special_ids: ids of the special tokens around a question and an answer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja source; None for the tokenizer's own.
        encoder: of the same tokenizer.

    Raises:
        ConfigError: the template can't be used for a question and an answer; the message says why.
    """

    def __init__(self, tokenizer: Any, template: str | None, encoder: TextEncoder) -> None:
        self._tokenizer, self._template, self._encoder = tokenizer, template, encoder
        self._frames: dict[tuple[Role, ...], tuple[Frame, ...]] = {}
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)
        frames = self.frames(("user", "assistant"))
        if not frames[-1].after:
            raise self._unusable("writes no special token after an answer, so a model could not learn to stop")
        self.end = frames[-1].after[-1]
        self.special_ids = self._special & {i for frame in frames for i in (*frame.before, *frame.after)}

    def frames(self, roles: tuple[Role, ...]) -> tuple[Frame, ...]:
        """Raises:
        ConfigError: the template refuses the sequence, or loses, repeats, moves or changes what is said.
        """
        if not roles:
            return ()
        frames = self._frames.get(roles)
        if frames is None:
            frames = self._make(roles)
            if len(self._frames) < _MAX_REMEMBERED:
                self._frames[roles] = frames
        return frames

    def _make(self, roles: tuple[Role, ...]) -> tuple[Frame, ...]:
        pieces = self._pieces(roles, "", "")
        padded = self._pieces(roles, _LEFT[0][0], _RIGHT[0][0])
        strips = [
            self._strips(piece, wide, is_first=number == 0, is_last=number == len(roles))
            for number, (piece, wide) in enumerate(zip(pieces, padded, strict=True))
        ]
        bare = [piece.rstrip(" ") for piece in pieces[:-1]]
        ids = [self._encoder.markup(piece, is_first=number == 0) for number, piece in enumerate([*bare, pieces[-1]])]
        ends = [0, *(self._end(piece) for piece in ids[1:])]
        return tuple(
            Frame(
                before=tuple(ids[number][ends[number] :]),
                after=tuple(ids[number + 1][: ends[number + 1]]),
                space=pieces[number][len(bare[number]) :],
                lstrip=strips[number][1],
                rstrip=strips[number + 1][0],
            )
            for number in range(len(roles))
        )

    def _pieces(self, roles: tuple[Role, ...], left: str, right: str) -> list[str]:
        """What the template writes before, between and after the turns' contents."""
        marks = [f"zq{number}qz" for number in range(len(roles))]
        messages = [{"role": role, "content": f"{left}{mark}{right}"} for role, mark in zip(roles, marks, strict=True)]
        rest, pieces = self._render(messages), []
        for mark, role in zip(marks, roles, strict=True):
            piece, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise self._unusable(f"loses, repeats or moves what the {role} says", roles)
            pieces.append(piece)
        return [*pieces, rest]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, chat_template=self._template))
        except Exception as error:  # a template may raise anything
            roles = tuple(message["role"] for message in messages)
            raise self._unusable(f"fails with {type(error).__name__}: {error}", roles) from error

    def _strips(self, piece: str, padded: str, *, is_first: bool, is_last: bool) -> tuple[str, str]:
        """Characters stripped from the right of the content before a piece, and from the left of the one after it."""
        rights, lefts = [("", "")] if is_first else _RIGHT, [("", "")] if is_last else _LEFT
        for (right, rstrip), (left, lstrip) in product(rights, lefts):
            if right + piece + left == padded:
                return rstrip, lstrip
        raise self._unusable("changes what is said")

    def _end(self, ids: Sequence[int]) -> int:
        """Number of ids up to and with the first special token; 0 where there is none."""
        return next((number + 1 for number, i in enumerate(ids) if i in self._special), 0)

    def _unusable(self, why: str, roles: Sequence[str] = ()) -> ConfigError:
        name = "ChatML template" if self._template else "tokenizer's chat template"
        return ConfigError(
            f"the {name} {why}.",
            where="text_processor.template",
            given=f"turns by {', '.join(roles)}" if roles else None,
            hint="Use `template: chatml` where the tokenizer has its tokens, or give the tokenizer another template.",
        )


def _strip(parts: list[Content], order: Iterable[int], strip: Callable[[str], str]) -> None:
    """Strip text up to the first that remains, or to a picture."""
    for number in order:
        part = parts[number]
        if not isinstance(part, Text):
            return
        parts[number] = stripped = Text(strip(part.text))
        if stripped.text:
            return
