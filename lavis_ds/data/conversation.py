"""A sample before it is encoded: who said what, and where the pictures stand. Every format becomes this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import PIL.Image

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. Whatever it spells, it is never read as a special token or an image."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture at this place of a turn.

    Attributes:
        path: absolute path of the file, a `data:` URL, or, with `data`, a name for messages (`shard.tar: 0001.jpg`).
        data: the file's bytes, or pixels already decoded, where it does not lie in a file of its own.
    """

    path: str
    data: bytes | PIL.Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """A video at this place of a turn.

    Its sampled frames take its place before encoding (`lavis_ds.data.video`), but where the model takes videos whole.

    Attributes:
        path: absolute path of a video file or of a folder of frames, or, with `data`, a name for messages.
        data: the file's bytes, where it does not lie in a file of its own.
    """

    path: str
    data: bytes | None = None


Content = Text | Image | Video


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says in one go.

    Attributes:
        role: who speaks.
        content: text, pictures and videos in order.
        weight: factor of its tokens' losses, where they are targets; 0 makes them no targets.
    """

    role: Role
    content: tuple[Content, ...]
    weight: float = 1.0

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

    @property
    def pictures(self) -> tuple[Image | Video, ...]:
        """All pictures, and all videos whose frames have not taken their places, in order of appearance."""
        return tuple(part for turn in self.turns for part in turn.content if not isinstance(part, Text))

    @property
    def videos(self) -> tuple[Video, ...]:
        """All videos in order of appearance."""
        return tuple(part for turn in self.turns for part in turn.content if isinstance(part, Video))
