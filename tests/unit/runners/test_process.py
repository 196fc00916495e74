"""Settings of the process, made in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from lavis_ds.runners import process
process.prepare(*sys.argv[1:])
import transformers
print(transformers.utils.logging.get_verbosity())
"""


@pytest.mark.parametrize(("level", "number"), [("error", 40), (None, 30)])
def test_transformers_says_as_much_as_was_asked_for(level: str | None, number: int) -> None:
    command = [sys.executable, "-c", SCRIPT, *([level] if level else [])]
    environment = {key: value for key, value in os.environ.items() if key != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout.split() == [str(number)]
