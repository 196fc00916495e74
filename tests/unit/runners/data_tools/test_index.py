"""After `lavis-ds data index` a run has nothing left to index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_project import make_project
from tests.unit.runners.data_tools.conftest import Command
from tests.unit.runners.test_data_modes import train

PACKED = ["--options", "data.batching=packed"]


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "cache"))
    return make_project(tmp_path / "p", num_datasets=2, max_steps=3, valid_splits=["val"])


def test_it_makes_what_a_run_needs_and_says_so(cfg: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    first = command("index", "--cfg", cfg, *PACKED)
    for line in ("tiny/train: 22 samples; made index of records, check of items in", "tiny/val: 5 samples; made"):
        assert line in first
    assert "words/train: 9 samples; made" in first
    assert "token counts: 3 optimizer steps of packed rows; made 2 x token counts, plan of rows" in first
    second = command("index", "--cfg", cfg, *PACKED)
    assert "made" not in second
    assert second.count("all there") == 4
    assert "All was there, in " in second

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr("lavis_ds.data.cache._write", never)
    assert train(cfg, "a", "data.batching=packed") == 0


def test_only_what_changed_is_made_again(cfg: Path, command: Command) -> None:
    command("index", "--cfg", cfg, *PACKED)
    words = cfg.parent / "words.json"
    words.write_text(words.read_text() + " ")
    again = command("index", "--cfg", cfg, *PACKED)
    assert "tiny/train: 22 samples; all there" in again
    assert "words/train: 9 samples; made" in again
    assert "made token counts in" in again  # of words alone, and the plan of rows is still right


def test_token_counts_are_left_out_where_nothing_needs_them(cfg: Path, command: Command) -> None:
    assert "token counts: not needed" in command("index", "--cfg", cfg)
    assert "only together with all training splits (train)" in command("index", "--cfg", cfg, "--split", "val", *PACKED)


def test_shards(cfg: Path, command: Command, tmp_path: Path) -> None:
    command("shard", "--cfg", cfg, "--dataset", "words", "--to", tmp_path / "s")
    for sidecar in (tmp_path / "s").glob("*.index.npz"):
        sidecar.unlink()
    (tmp_path / "s" / "000000.tar").rename(tmp_path / "s" / "a.tar")  # another name than was indexed while writing
    entry = f"datasets.words={{builder: webdataset, format: messages, annotations: {{train: {tmp_path}/s/*.tar}}}}"
    assert "words/train: 9 samples; made index of shards" in command("index", "--cfg", cfg, "--options", entry)
    assert "words/train: 9 samples; all there" in command("index", "--cfg", cfg, "--options", entry)


def test_wrong_files_and_splits(cfg: Path, command: Command) -> None:
    assert "Did you mean 'train'?" in command("index", "--cfg", cfg, "--split", "trian", code=2)
    (cfg.parent / "words.json").write_text("[{}]")
    assert "words.json" in command("index", "--cfg", cfg, code=2)
