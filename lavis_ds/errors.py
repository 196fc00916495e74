"""The errors a user can meet, and the one way their text is laid out.

Every message answers four questions: where, what was given, what was expected, what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Self


class LavisError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: the key path, file, sample id or command-line option concerned.
        given: the offending value, as the user wrote it.
        expected: what would have been right.
        hint: what to do next.
    """

    exit_code = 1
    is_of_all_ranks = False

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        given: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.given, self.expected, self.hint = what, where, given, expected, hint
        super().__init__(self._text())

    def of_all_ranks(self) -> Self:
        """This error, marked as one that every rank raises with the same text, so that one of them tells it."""
        self.is_of_all_ranks = True
        return self

    def _text(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.given is not None:
            parts.append(f"Given: {self.given}.")
        if self.expected:
            parts.append(f"Expected: {self.expected}.")
        if self.hint:
            parts.append(self.hint)
        return " ".join(parts)


class ConfigError(LavisError):
    """A key, type, value or combination in the configuration or on the command line is wrong."""

    exit_code = 2


class RegistryError(ConfigError):
    """A name is not registered, or is registered twice."""


class DataError(LavisError):
    """A dataset file, a sample or a batch is not what it should be."""

    exit_code = 2


class SampleError(DataError):
    """One sample can't be used.

    Attributes:
        sample_id: which.
        source: the file concerned, where one is known.
    """

    sample_id: str = ""
    source: str | None = None

    @classmethod
    def about(cls, sample_id: str, error: LavisError) -> SampleError:
        """`error` as one that names the sample."""
        source = error.where if error.where != sample_id else None
        place = f"{sample_id} ({source})" if source else sample_id
        made = cls(error.what, where=place, given=error.given, expected=error.expected, hint=error.hint)
        made.sample_id, made.source = sample_id, source
        return made


class CheckpointError(LavisError):
    """A checkpoint or weight file is missing, incomplete, damaged or does not fit."""

    exit_code = 2


class NonFiniteError(LavisError):
    """The loss or the gradient stopped being a finite number."""


class MemoryExhaustedError(LavisError):
    """The GPU or the host has no memory left."""


def listed(first: Sequence[str], total: int) -> str:
    """The first of `total` lines, each on a line of its own and indented, and how many more there are."""
    more = [f"and {total - len(first)} more"] if total > len(first) else []
    return "".join(f"\n  {line}" for line in [*first, *more])


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that resemble `name`, best first."""
    by_folded = {k.lower(): k for k in known}
    return [by_folded[m] for m in difflib.get_close_matches(name.lower(), by_folded, n=3, cutoff=0.6)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or the empty string where nothing is close."""
    matches = closest(name, known)
    return f"Did you mean {' or '.join(repr(m) for m in matches)}?" if matches else ""
