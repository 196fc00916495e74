"""Run the parity tests and write their measured errors into the table of docs/design/parity.md.

Usage: python scripts/benchmarks/parity.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "parity.md"
TESTS = [path for path in (ROOT / "tests" / "unit" / "models").glob("test_*.py") if "tests.parity" in path.read_text()]
BEGIN, END = "<!-- measured by scripts/benchmarks/parity.py: begin -->", "<!-- end -->"
COLUMNS = ("forward", "loss", "gradient")

Key = tuple[str, str, str]
"""What is compared, with what, and in which test."""


def main() -> int:
    """Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *map(str, TESTS)]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode:
            return 1
        lines = table(worst(recorded(report)))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))
    print(f"{len(lines) - 2} rows in {PAGE.relative_to(ROOT)}")
    return 0


def recorded(report: Path) -> Iterator[tuple[Key, dict[str, float]]]:
    """What each test recorded (`tests/parity.py`)."""
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.attrib['classname'].rsplit('.', 1)[-1]}::{case.attrib['name'].partition('[')[0]}"
        for item in case.iter("property"):
            if item.attrib["name"] == "parity":
                values = json.loads(item.attrib["value"])
                yield (values.pop("what"), values.pop("reference"), name), values


def worst(records: Iterator[tuple[Key, dict[str, float]]]) -> dict[Key, tuple[int, dict[str, float]]]:
    """Number of cases and largest errors of each row."""
    found: dict[Key, tuple[int, dict[str, float]]] = {}
    for key, errors in records:
        count, largest = found.get(key, (0, {}))
        found[key] = count + 1, {name: max(errors[name], largest.get(name, 0.0)) for name in errors}
    return found


def table(rows: dict[Key, tuple[int, dict[str, float]]]) -> list[str]:
    lines = [
        "| part or family | reference | cases | forward | loss | gradient | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for (what, reference, test), (count, errors) in sorted(rows.items()):
        numbers = " | ".join(_number(errors.get(name)) for name in COLUMNS)
        lines.append(f"| {what} | {reference} | {count} | {numbers} | `{test}` |")
    return lines


def _number(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.0e}" if error else "0"


if __name__ == "__main__":
    sys.exit(main())
