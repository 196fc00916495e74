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


RECORDED = """
import os
from lavis_ds.runners import process
process.prepare()
print(os.environ.get("TORCH_FR_BUFFER_SIZE"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"TORCH_FR_BUFFER_SIZE": "0"}, "0"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, "None")],
)
def test_collectives_are_recorded_unless_the_user_decides(given: dict[str, str], expected: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in RECORDERS} | given
    command = [sys.executable, "-c", RECORDED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout.strip() == expected


RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
