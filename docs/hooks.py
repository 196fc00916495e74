"""Pages that are written by the code they describe, so that they cannot be out of date. Run by mkdocs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

from lavis_ds import cli
from lavis_ds.config import reference


def _commands() -> str:
    """The `--help` of every command."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    return "\n\n".join(f"## {name}\n\n```text\n{parser.format_help()}```" for name, parser in _subparsers(cli.parser()))


def _subparsers(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{before}{name}", command
                yield from _subparsers(command, f"{before}{name} ")


GENERATED: dict[str, Callable[[], str]] = {
    "<!-- generated: configuration keys -->": reference.text,
    "<!-- generated: commands -->": _commands,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    for mark, generate in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, generate())
    return markdown
