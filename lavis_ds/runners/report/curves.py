"""Curves as geometry: numbers become SVG coordinates, ticks and hover texts; the page's template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lavis_ds.runners.observers.numbers import short
from lavis_ds.runners.report.read import Array

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 34
_LINE_POINTS = 280
_HOVER_POINTS = 90
_LEAST_NOISY = 40
"""Fewer values than this are drawn as they are."""


@dataclass(frozen=True)
class Series:
    """Values to draw.

    Attributes:
        label: text in the legend.
        color: index of the colour; a run keeps its own in every chart.
        steps, values: (n,) each, steps growing.
        style: `noisy` is a moving average over a band from the least to the largest value; `line` is the values;
            `points` is the values with a dot each.
    """

    label: str
    color: int
    steps: Array
    values: Array
    style: str = "line"


@dataclass(frozen=True)
class Drawn:
    """A series in SVG coordinates; `line` and `band` are path data, `dots` are points."""

    label: str
    color: int
    style: str
    line: str
    band: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True)
class Hover:
    """A strip of the chart that shows `text` under the pointer, and a dot on every series: (x, y, colour)."""

    x: float
    left: float
    width: float
    text: str
    dots: list[tuple[float, float, int]]


@dataclass(frozen=True)
class Chart:
    """Everything the template needs to draw one chart; coordinates are those of a WIDTH x HEIGHT view box."""

    title: str
    unit: str
    series: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    hovers: list[Hover]
    note: str


@dataclass
class _Curve:
    """A series made ready: finite values, their smooth line, and at most _LINE_POINTS buckets of them."""

    series: Series
    steps: Array
    line: Array
    low: Array
    high: Array
    values: Array = field(repr=False)


def smooth(values: Array, span: float) -> Array:
    """Exponential moving average with bias correction, (n,), as if over about `span` values."""
    keep = 1 - 2 / (span + 1)
    total, weight, out = 0.0, 0.0, np.empty(len(values))
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        out[i] = total / weight
    return out


def span_of(count: int) -> int:
    """How many values the average of a noisy series of `count` values goes over."""
    return max(1, round(count / 40)) if count >= _LEAST_NOISY else 1


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) from `low` to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def draw(
    title: str,
    series: Sequence[Series],
    unit: str = "",
    from_zero: bool = False,
    text: Callable[[float], str] = short,
) -> Chart | None:
    """The chart of some series over optimizer steps; None where no series has a finite value.

    Args:
        title: what is drawn.
        series: what to draw.
        unit: unit of the values.
        from_zero: whether the value axis starts at 0, so that lengths compare.
        text: a value as text.
    """
    curves = [_prepare(s) for s in series if np.isfinite(s.values).any()]
    if not curves:
        return None
    x_of, x_ticks = _x_axis(curves)
    low, high = _y_range(curves, from_zero)

    def y_of(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    return Chart(
        title=title,
        unit=unit,
        series=[_drawn(c, x_of, y_of) for c in curves],
        x_ticks=x_ticks,
        y_ticks=[(y_of(t), text(t)) for t in nice_ticks(low, high)],
        hovers=_hovers(curves, x_of, y_of, text),
        note=_note(series, curves, low, high, text),
    )


def _prepare(series: Series) -> _Curve:
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    line = smooth(values, span_of(len(values))) if series.style == "noisy" else values
    starts = np.unique(np.linspace(0, len(values), min(len(values), _LINE_POINTS), endpoint=False).astype(int))
    ends = np.append(starts[1:], len(values)) - 1
    return _Curve(
        series,
        steps[ends],
        line[ends],
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        values,
    )


def _x_axis(curves: Sequence[_Curve]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    last = max(float(c.steps[-1]) for c in curves)
    high = max(last, 1.0)

    def x_of(step: float) -> float:
        return round(LEFT + step / high * (WIDTH - LEFT - RIGHT), 1)

    return x_of, [(x_of(t), short(t)) for t in nice_ticks(0, high) if t == int(t)]


def _y_range(curves: Sequence[_Curve], from_zero: bool) -> tuple[float, float]:
    """From the lowest to the highest value, except that single spikes don't flatten the rest."""
    usual_low = float(min(min(c.line.min(), np.percentile(c.values, 0.5)) for c in curves))
    usual_high = float(max(max(c.line.max(), np.percentile(c.values, 99.5)) for c in curves))
    room = 0.4 * (usual_high - usual_low)
    low = max(usual_low - room, min(float(c.values.min()) for c in curves))
    high = min(usual_high + room, max(float(c.values.max()) for c in curves))
    if low >= 0 and (from_zero or low < 0.4 * high):
        low = 0.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    return low, high + 0.04 * (high - low)


def _drawn(curve: _Curve, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> Drawn:
    xs = [x_of(s) for s in curve.steps]
    line = list(zip(xs, map(y_of, curve.line), strict=True))
    is_banded = curve.series.style == "noisy" and len(curve.values) >= _LEAST_NOISY
    upper, lower = zip(xs, map(y_of, curve.high), strict=True), zip(xs, map(y_of, curve.low), strict=True)
    band = _path([*upper, *reversed(list(lower))]) + "Z" if is_banded else ""
    dots = line if curve.series.style == "points" or len(line) == 1 else []
    return Drawn(curve.series.label, curve.series.color, curve.series.style, _path(line), band, dots)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _hovers(
    curves: Sequence[_Curve],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    text: Callable[[float], str],
) -> list[Hover]:
    steps = np.unique(np.concatenate([c.steps for c in curves]))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _HOVER_POINTS)).astype(int))]
    xs = [x_of(s) for s in steps]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(xs)), WIDTH - RIGHT]
    hovers = []
    for i, (step, x) in enumerate(zip(steps, xs, strict=True)):
        dots, lines = [], [f"step {int(step):,}"]
        for curve in curves:
            at = int(np.argmin(np.abs(curve.steps - step)))
            dots.append((x_of(curve.steps[at]), y_of(curve.line[at]), curve.series.color))
            lines.append(f"{curve.series.label} {text(curve.line[at])}{_between(curve, at, text)}")
        hovers.append(Hover(x, round(edges[i], 1), round(edges[i + 1] - edges[i], 1), "\n".join(lines), dots))
    return hovers


def _between(curve: _Curve, at: int, text: Callable[[float], str]) -> str:
    if curve.series.style != "noisy" or curve.low[at] == curve.high[at]:
        return ""
    return f" ({text(curve.low[at])} to {text(curve.high[at])})"


def _note(
    series: Sequence[Series], curves: Sequence[_Curve], low: float, high: float, text: Callable[[float], str]
) -> str:
    parts = []
    spans = [span_of(len(c.values)) for c in curves if c.series.style == "noisy"]
    if max(spans, default=1) > 1:
        parts.append(f"Line: moving average over about {max(spans)} steps. Band: lowest to highest value.")
    outside = sum(int(((c.values > high) | (c.values < low)).sum()) for c in curves)
    if outside:
        largest = max(float(c.values.max()) for c in curves)
        parts.append(f"Outside the frame: {outside} value{'s' * (outside > 1)} (largest {text(largest)}).")
    infinite = sum(int((~np.isfinite(s.values)).sum()) for s in series)
    if infinite:
        parts.append(f"Not finite, not drawn: {infinite} value{'s' * (infinite > 1)}.")
    return " ".join(parts)
