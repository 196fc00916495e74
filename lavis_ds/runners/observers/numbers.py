"""Numbers as text for people: short, with the digits that matter."""

from __future__ import annotations

import math

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def short(value: float) -> str:
    """`value` with up to four significant digits: `0.5231`, `12.35k`, `2e-05`, `120`."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    for size, suffix in _SUFFIXES:
        if magnitude >= size:
            divisor = 1e3 if suffix == "k" else size
            return f"{value / divisor:.4g}{suffix}"
    return f"{value:.3g}" if 0 < magnitude < 1e-3 else f"{value:.4g}"


def percent(fraction: float) -> str:
    """A fraction of 1 in percent: `86.2 %`."""
    return f"{100 * fraction:.1f} %"


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`; from one day on `1d 02:03:04`."""
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def size_bytes(value: float) -> str:
    """Bytes in binary units: `12.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
