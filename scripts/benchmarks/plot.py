"""Bars of tokens a second from a result of `training.py`, peers last, as SVG.

python scripts/benchmarks/plot.py docs/benchmarks/results/training.json docs/benchmarks/training.svg
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, HEIGHT, GAP, RIGHT = 760, 300, 24, 10, 90
OURS, PEERS = "#2f6fb0", "#9a9a9a"


def svg(result: dict[str, Any]) -> str:
    """The picture.

    Args:
        result: `rows` and `peers`, each with `way`, `tokens_per_s` and `peak_gib`.
    """
    bars = [(row, OURS) for row in result["rows"] if "tokens_per_s" in row]
    bars += [(row, PEERS) for row in result.get("peers", ())]
    most = max(row["tokens_per_s"] for row, _ in bars)
    lines = []
    for number, (row, colour) in enumerate(bars):
        top, length = GAP + number * (HEIGHT + GAP), (WIDTH - LEFT - RIGHT) * row["tokens_per_s"] / most
        middle = top + HEIGHT / 2
        lines += [
            f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(row["way"].split(", Flash")[0])}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{HEIGHT}" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{row["tokens_per_s"]:,.0f}</text>',
            f'<text x="{LEFT + 6}" y="{middle}" fill="white">{row["peak_gib"]:.0f} GiB</text>',
        ]
    height = GAP + len(bars) * (HEIGHT + GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            'font-size="13" dominant-baseline="central">',
            f"<title>Tokens a second on one {escape(result['device'])}, and peak memory</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.picture.write_text(svg(json.loads(arguments.result.read_text())))


if __name__ == "__main__":
    main()
