"""The picture of a benchmark says what its numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from scripts.benchmarks.plot import svg

PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"


def test_bars_are_as_long_as_their_numbers_are_large() -> None:
    rows = [
        {"way": "default", "tokens_per_s": 300, "peak_gib": 10.0},
        {"way": "died", "exit_code": 1},
        {"way": "a & b", "tokens_per_s": 150, "peak_gib": 20.4},
    ]
    peers = [{"way": "peer, FlashAttention 2", "tokens_per_s": 75, "peak_gib": 9.0}]
    picture = ElementTree.fromstring(svg({"rows": rows, "peers": peers, "device": "GPU"}))
    bars = [bar for bar in picture.findall("{*}rect") if bar.get("x")]
    assert [float(bar.get("width", 0)) for bar in bars] == [370.0, 185.0, 92.5]
    texts = [text.text for text in picture.findall("{*}text")]
    assert texts == ["default", "300", "10 GiB", "a & b", "150", "20 GiB", "peer", "75", "9 GiB"]


def test_the_page_shows_the_newest_result() -> None:
    result = json.loads((PAGES / "results" / "training.json").read_text())
    assert (PAGES / "training.svg").read_text() == svg(result)
