"""Token ids -> the text that each of them adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_IDS = 4
"""A character has up to 4 bytes, each of which may be a token."""
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters -> their pictures: what data holds must not move the cursor of whoever looks at it."""


@dataclass(frozen=True)
class Piece:
    """Text that belongs together.

    Attributes:
        text: what the ids add to what stands before them.
        ids: one token, or the several that share a character.
    """

    text: str
    ids: tuple[int, ...]


def pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[Piece]:
    """The text of `ids`, piece by piece.

    Each id is decoded behind the piece before it, since tokenizers treat the beginning of a text in their own way.
    """
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        known, text = (_decode(tokenizer, ids[before:stop]) for stop in (start, end))
        if text.endswith("\ufffd") and end - start < _MOST_IDS and end < len(ids):
            continue  # a part of a character
        yield Piece(text[len(known) :].translate(_CONTROL), tuple(ids[start:end]))
        before, start = start, end


def visible(text: str) -> str:
    """The text with pictures of control characters in their place."""
    return text.translate(_CONTROL)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
