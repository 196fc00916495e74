"""Samples in the terminal: trained tokens in colour, or in brackets where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.runners.data_tools.samples import Look, Picture, Stretch
from lavis_ds.runners.data_tools.token_text import visible
from lavis_ds.runners.observers.numbers import percent

OPEN, CLOSE = "⟦", "⟧"
_TRAINED = ("bold green", "bold bright_cyan")
_OTHER = ("", "dim")
"""Styles of tokens; neighbours alternate, so that one sees where each ends."""


def show(looks: Iterable[Look], console: Console | None = None) -> None:
    """Print samples, each as soon as it is there."""
    console = console or Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    mark = Text("trained tokens", _TRAINED[0]) if colour else Text(f"{OPEN}trained tokens{CLOSE}")
    _print(console, Text.assemble(mark, "; pictures folded, as <picture 1: 256 tokens>"))
    for look in looks:
        _print(console, Text.assemble("\n", (look.id, "bold"), (f"  sample {look.index} of its dataset", "dim")))
        for line in _about(look):
            _print(console, line)
        _print(console, Text.assemble("\n", *_text(look, colour)))


def counts(look: Look) -> Iterator[tuple[str, str]]:
    """What there is to count in a sample that can be used: label and value."""
    sample = look.sample
    if sample is None:
        return
    tokens, targets = len(sample.input_ids), int((sample.labels != IGNORE_INDEX).sum())
    yield "tokens", f"{tokens:,}"
    yield "targets", f"{targets:,} ({percent(targets / tokens)})"
    weights = sorted({stretch.weight for stretch in look.stretches if stretch.weight})
    if weights != [1.0]:
        yield "weights of targets", ", ".join(f"{weight:g}" for weight in weights)
    yield "pictures", str(sum(len(picture.views) > 0 for picture in look.pictures))
    if len(sample.images) != len(look.pictures):
        yield "views", str(len(sample.images))
    if sample.segment_ids is not None:
        yield "segments", str(len({stretch.segment for stretch in look.stretches}))
    if sample.num_dropped_turns:
        yield "turns left out or cut (too long)", str(sample.num_dropped_turns)


def about_picture(picture: Picture) -> str:
    """Its size, and what became of it."""
    width, height = picture.size
    if not len(picture.views):
        return f"{width} x {height}, left out with its turn"
    number, _, view_height, view_width = picture.views.shape
    views = "1 view" if number == 1 else f"{number} views"
    return f"{width} x {height} -> {views} of {view_width} x {view_height}"


def label(stretch: Stretch) -> str:
    """What stands for the tokens of a picture."""
    assert stretch.picture is not None
    return f"<picture {stretch.picture + 1}: {stretch.num_tokens} tokens>"


def _about(look: Look) -> Iterator[Text]:
    if look.error is not None:
        yield Text(f"can't be used: {visible(look.error)}", "bold red")
        return
    yield Text(", ".join(f"{name} {value}" for name, value in counts(look)))
    for number, picture in enumerate(look.pictures, start=1):
        yield Text(f"picture {number}: {about_picture(picture)}  {visible(picture.image.path[:200])}", "dim")


def _text(look: Look, colour: bool) -> Iterator[Text]:
    yield from (Text(f"{role}: {said}\n") for role, said in look.raw)
    segment = 0
    for stretch in look.stretches:
        if stretch.segment != segment:
            segment = stretch.segment
            yield Text(f"\n<segment {segment}>\n", "yellow")
        if stretch.picture is not None:
            yield Text(label(stretch), "yellow")
            continue
        yield from _tokens(stretch, colour)


def _tokens(stretch: Stretch, colour: bool) -> Iterator[Text]:
    trained = stretch.weight > 0
    factor = f"{stretch.weight:g}x " if trained and stretch.weight != 1 else ""
    before, after = (OPEN, CLOSE) if trained and not colour else ("", "")
    yield Text(before + factor, "yellow")
    for number, piece in enumerate(stretch.pieces):
        yield Text(piece.text, (_TRAINED if trained else _OTHER)[number % 2])
    yield Text(after)


def _print(console: Console, text: Text) -> None:
    """Never wrapped, so that it can be searched and piped; a terminal wraps by itself."""
    console.print(text, soft_wrap=True)
