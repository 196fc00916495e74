"""A sample before it is encoded: who said what, and where the pictures stand. Every format becomes this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. Whatever it spells, it is never read as a special token or an image."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture at this place of a turn.

    Attributes:
        path: absolute path of the file.
    """

    path: str


Content = Text | Image


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says in one go."""

    role: Role
    content: tuple[Content, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample of a dataset.

    Attributes:
        id: unique within its dataset and stable between runs.
        turns: in order.
        references: what evaluation compares with, such as `answer` and `question_type`.
    """

    id: str
    turns: tuple[Turn, ...]
    references: dict[str, Any] | None = None

    @property
    def images(self) -> tuple[Image, ...]:
        """All pictures in order of appearance."""
        return tuple(part for turn in self.turns for part in turn.content if isinstance(part, Image))
