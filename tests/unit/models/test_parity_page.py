"""docs/design/parity.md names tests that exist, and every test that records errors."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_rows_of_the_page_are_the_tests_that_record() -> None:
    named = set(re.findall(r"\| `(\w+)::(\w+)` \|", (ROOT / "docs" / "design" / "parity.md").read_text()))
    recording = {
        (path.stem, function)
        for path in Path(__file__).parent.glob("test_*.py")
        for function in re.findall(r"^def (test_\w+)\(\s*parity: Parity", path.read_text(), re.MULTILINE)
    }
    assert recording
    assert named == recording
