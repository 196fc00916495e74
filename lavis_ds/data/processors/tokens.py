"""Text to ids, and the stretches of ids that a sample is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SHORT, _MAX_REMEMBERED = 100, 10_000
"""Characters of a text, and number of texts, whose ids are remembered: a few MiB at most."""
_ANCHOR = "\n"


class TextEncoder:
    """Each piece of text is tokenised on its own, so it has the same ids wherever it stands.

    Tokenizers that put a space before whatever they are given (Llama 2, Mistral 7B) get each piece after a line break,
    whose ids are then taken off: else every piece would begin with a space that nobody wrote.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._remembered: dict[str, Sequence[int]] = {}
        self._anchor = self._tokenise(_ANCHOR, plain=True)
        alone, behind = (self._tokenise(text, plain=True) for text in ("a", f"{_ANCHOR}a"))
        self._adds_space = [*self._anchor, *alone] != [*behind]

    def text(self, text: str) -> Sequence[int]:
        """Ids of what somebody says: what spells a special token is text. Short texts are remembered."""
        ids = self._remembered.get(text)
        if ids is None:
            ids = self._inside(text, plain=True)
            if len(text) <= _SHORT and len(self._remembered) < _MAX_REMEMBERED:
                self._remembered[text] = ids
        return ids

    def markup(self, text: str, *, is_first: bool) -> Sequence[int]:
        """Ids of what a template writes, special tokens included."""
        return self._tokenise(text, plain=False) if is_first else self._inside(text, plain=False)

    def _inside(self, text: str, *, plain: bool) -> Sequence[int]:
        """Ids of a text that is not the first."""
        if not self._adds_space or not text:
            return self._tokenise(text, plain=plain)
        ids = self._tokenise(_ANCHOR + text, plain=plain)
        start = len(self._anchor)
        return ids[start:] if ids[:start] == self._anchor else self._tokenise(text, plain=plain)

    def _tokenise(self, text: str, *, plain: bool) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=plain, verbose=False
        )
        return ids


@dataclass
class Tokens:
    """A stretch of a sample.

    Attributes:
        ids: token ids.
        weights: factor of each token's loss; 0 where it is no target.
        runs: places in `ids` that pictures and videos fill, in order.
        pictures: all that stands for each picture or video: one run or, of a video, several, and what is around them.
        turn_ends: where each turn ends.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    runs: list[range] = field(default_factory=list)
    pictures: list[range] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def image_index(self) -> Tensor:
        """(n,) int64, all places that pictures and videos fill."""
        places = [torch.arange(run.start, run.stop) for run in self.runs]
        return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)

    def add(self, ids: Sequence[int], weight: float = 0.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def add_places(self, filler: int, count: int) -> None:
        self.runs.append(range(len(self), len(self) + count))
        self.add([filler] * count)

    def end_picture(self, start: int) -> None:
        """All from `start` on stands for one picture or video."""
        self.pictures.append(range(start, len(self)))

    def end_turn(self) -> None:
        self.turn_ends.append(len(self))

    def append(self, other: Tokens) -> None:
        start = len(self)
        self.runs += [range(start + run.start, start + run.stop) for run in other.runs]
        self.pictures += [range(start + whole.start, start + whole.stop) for whole in other.pictures]
        self.turn_ends += [start + end for end in other.turn_ends]
        self.ids += other.ids
        self.weights += other.weights

    def cut(self, length: int) -> int:
        """Keep the first `length` tokens, or fewer where that would leave a part of a picture or a video.

        Returns:
            Number of turns that this leaves out or cuts.
        """
        self.pictures = [whole for whole in self.pictures if whole.start < length]
        if self.pictures and self.pictures[-1].stop > length:
            length = self.pictures.pop().start
        self.runs = [run for run in self.runs if run.start < length]
        del self.ids[length:], self.weights[length:]
        whole = [end for end in self.turn_ends if end <= length]
        num_cut, self.turn_ends = len(self.turn_ends) - len(whole), whole
        return num_cut
