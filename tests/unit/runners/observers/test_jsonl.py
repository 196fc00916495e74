"""`metrics.jsonl`: same bits back, and after a resume the same file as without the interruption."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path

import pytest

from lavis_ds.errors import DataError
from lavis_ds.runners.observers.base import Metrics, RunInfo
from lavis_ds.runners.observers.jsonl import JsonlObserver


def metrics_of(step: int) -> Metrics:
    return {"epoch": step / 7, "train/loss": math.exp(-step / 3), "data/sample_ids": [f"é/{step}", "b"]}


def run(folder: Path, start: int, stop: int) -> None:
    observer = JsonlObserver()
    observer.on_start(RunInfo(folder, 20, {}, start_step=start), None)
    for step in range(start + 1, stop + 1):
        observer.on_step(step, metrics_of(step))
    observer.close()


def test_step_first_then_the_keys_as_given(tmp_path: Path) -> None:
    run(tmp_path, 0, 1)
    assert list(json.loads((tmp_path / "metrics.jsonl").read_text())) == ["step", *metrics_of(1)]


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(500)]
    values = [v for v in values if not math.isnan(v)] + [0.1 + 0.2, 5e-324, -0.0, 1e308, math.inf]
    observer = JsonlObserver()
    observer.on_start(RunInfo(tmp_path, 1, {}), None)
    observer.on_step(1, {str(i): v for i, v in enumerate(values)})
    back = json.loads((tmp_path / "metrics.jsonl").read_text())  # flushed: readable before close
    observer.close()
    assert [struct.pack("<d", back[str(i)]) for i in range(len(values))] == [struct.pack("<d", v) for v in values]


@pytest.mark.parametrize("tail", ["", '{"step": 11, "train/lo', '{"step": 11', "\x00\x00\x00", '{"step": 11}'])
@pytest.mark.parametrize("resume_at", [0, 4, 10])
def test_resumed_file_equals_the_uninterrupted_one(tmp_path: Path, resume_at: int, tail: str) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    run(whole, 0, 20)
    run(resumed, 0, 10)
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(tail)
    run(resumed, resume_at, 20)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [p.name for p in resumed.iterdir()] == ["metrics.jsonl"]


def test_a_complete_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    run(tmp_path, 0, 4)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    run(tmp_path, 4, 5)
    run(tmp_path, 4, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:4]) == whole
    assert len(lines) == 5


def test_evaluating_an_old_checkpoint_cuts_nothing(tmp_path: Path) -> None:
    run(tmp_path, 0, 8)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    observer = JsonlObserver()
    observer.on_start(RunInfo(tmp_path, 8, {}, start_step=4), None)
    observer.on_evaluate("test", 4, {"accuracy": 0.5}, [])
    observer.on_end("finished")
    observer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    damaged = "".join([lines[0], "oops\n", *lines[1:]])
    path.write_text(damaged)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: .*oops"):
        run(tmp_path, 2, 3)
    assert path.read_text() == damaged
