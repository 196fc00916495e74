"""The sub-commands of `lavis-ds data` on the command line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lavis_ds.cli import main, parser
from tests.unit.runners.data_tools.conftest import Command

TOOLS = ["inspect", "stats", "index", "shard"]


@pytest.mark.parametrize("arguments", [[], ["look"], ["inspect"], ["shard", "--cfg", "a.yaml"], ["stats", "--nope"]])
def test_wrong_arguments_end_like_other_errors(arguments: list[str], command: Command) -> None:
    assert "See `lavis-ds data" in command(*arguments, code=2)


def test_defaults() -> None:
    shard = parser().parse_args(["data", "shard", "--cfg", "a", "--to", "b"])
    assert (shard.split, shard.max_samples, shard.max_bytes, shard.num_processes) == ("train", 10_000, "1GiB", None)
    inspect = parser().parse_args(["data", "inspect", "--cfg", "a"])
    assert (inspect.split, inspect.num, inspect.index, inspect.seed_epoch, inspect.options) == (None, 4, [], 0, [])


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", tool, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: lavis-ds data {tool}")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mistake_is_told_before_torch_is_imported(tool: str) -> None:
    code = f"import sys; from lavis_ds.cli import main; c = main(['data', {tool!r}, '--cfg', 'absent.yaml'"
    code += ", '--to', 'x'])" if tool == "shard" else "])"
    code += "; sys.exit(c if 'torch' not in sys.modules else 99)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "absent.yaml: there is no such file." in done.stderr
