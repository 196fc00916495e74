"""`run.observers`: names, missing packages, and what is imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lavis_ds.errors import ConfigError
from lavis_ds.runners import observers
from lavis_ds.runners.observers.console import ConsoleObserver
from lavis_ds.runners.observers.jsonl import JsonlObserver


def test_build_keeps_the_order_and_builds_a_name_once() -> None:
    built = observers.build(["jsonl", "console", "jsonl"], log_every=7)
    assert [type(o) for o in built] == [JsonlObserver, ConsoleObserver]
    assert all(o.log_every == 7 for o in built)


def test_every_name_leads_to_an_observer() -> None:
    names = [name for name, entry in observers.OBSERVERS.items() if entry.package is None]
    assert all(isinstance(o, observers.base.Observer) for o in observers.build(names, 1))


def test_a_wrong_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*console, jsonl, tensorboard, wandb, report.*'tensorboard'"):
        observers.check(["console", "tensorbord"])


def test_a_missing_package_is_refused_with_the_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = observers.Entry("x:Y", package="surely_not_installed_pkg")
    monkeypatch.setitem(observers.OBSERVERS, "other", entry)
    with pytest.raises(ConfigError, match="pip install surely_not_installed_pkg"):
        observers.check(["other"])
    # A folder of that name (wandb makes one in the working directory) is no package.
    (tmp_path / "surely_not_installed_pkg").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install"):
        observers.check(["other"])


def test_names_jsonl_console_and_report_do_without_torch() -> None:
    code = (
        "import sys; from lavis_ds.runners import observers; observers.check(['tensorboard', 'console', 'report']); "
        "observers.build(['console', 'jsonl', 'report'], 1); import lavis_ds.runners.report; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'wandb')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
