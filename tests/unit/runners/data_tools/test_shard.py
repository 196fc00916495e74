"""`lavis-ds data shard`: what it writes trains as what it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lavis_ds.data.order import SampleKey
from lavis_ds.errors import ConfigError
from lavis_ds.runners.data_tools.shard import parse_size
from tests.unit.runners.data_tools.conftest import Command


def test_the_yaml_that_it_prints_gives_the_same_samples(
    project: Path, command: Command, encoded: Any, tmp_path: Path
) -> None:
    options = ["datasets.words.repeat=2", "datasets.words.text_processor={name: chat, system: a}"]
    printed = command("shard", "--cfg", project, "--to", tmp_path / "s", "--max-samples", 5, "--options", *options)
    assert "# tiny: 22 samples" in printed
    assert "shards: 5" in printed
    tree = yaml.safe_load(project.read_text())
    tree["datasets"] = yaml.safe_load(printed)["datasets"]
    assert tree["datasets"]["words"]["repeat"] == 2
    (tmp_path / "sharded.yaml").write_text(yaml.safe_dump(tree))
    before, after = encoded(project, *options).data, encoded(tmp_path / "sharded.yaml").data
    assert after.sizes == before.sizes == (22, 9)
    for number, size in enumerate(before.sizes):
        for index in range(size):
            key = SampleKey(number, index, 1, 0)
            old, new = before[key], after[key]
            for name in ("input_ids", "labels", "images", "image_index"):
                assert torch.equal(getattr(old, name), getattr(new, name)), (old.id, name)


def test_it_goes_on_where_it_was(project: Path, command: Command, tmp_path: Path) -> None:
    arguments = ["shard", "--cfg", project, "--to", tmp_path, "--dataset", "words", "--max-samples", 3]
    command(*arguments)
    (tmp_path / "000001.tar").unlink()
    assert "9 samples" in (printed := command(*arguments, "--num-processes", 1))
    assert "shards: 3, 2 of which were there" in printed
    assert "written with other options" in command(*arguments[:-1], 4, code=2)


def test_shards_are_no_longer_than_allowed(project: Path, command: Command, tmp_path: Path) -> None:
    command("shard", "--cfg", project, "--to", tmp_path, "--dataset", "tiny", "--max-bytes", "60KiB")
    sizes = [path.stat().st_size for path in tmp_path.glob("*.tar")]
    assert len(sizes) > 2
    assert max(sizes) <= 61_440 + 10_240  # tar's end is padded to 10 KiB


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 2**30), ("500 MiB", 500 * 2**20), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("1000", 1000), ("10B", 10)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--max-bytes") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1 IB", "1e9", "1GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-bytes: this is no size"):
        parse_size(text, "--max-bytes")


def test_wrong_input(project: Path, command: Command, tmp_path: Path) -> None:
    common = ["shard", "--cfg", project, "--to", tmp_path]
    assert "this is no size" in command(*common, "--max-bytes", "much", code=2)
    assert "has no split 'val'" in command(*common, "--split", "val", "--dataset", "words", code=2)
    assert "no such dataset" in command(*common, "--dataset", "none", code=2)
