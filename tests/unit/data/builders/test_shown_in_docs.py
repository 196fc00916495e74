"""What the how-to pages show of formats and builders works as shown."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lavis_ds
from lavis_ds import registry
from lavis_ds.data.builders.records import RecordsBuilder
from lavis_ds.data.conversation import Conversation, Image, Text

PAGES = Path(__file__).parents[4] / "docs" / "how-to"
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)


def _formats() -> dict[str, list[tuple[dict[str, Any], list[str]]]]:
    """Builder -> the entries shown for it, each with the contents of its files."""
    page = (PAGES / "your-data.md").read_text()
    section = page[page.index("\n## Formats\n") : page.index("\n## Videos\n")]
    shown: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}
    for part in section.split("\n### ")[1:]:
        entries = shown.setdefault(part.split("\n")[0].strip("`"), [])
        for block in BLOCK.finditer(part):
            if block["language"] == "yaml":
                (entry,) = yaml.safe_load(block["text"])["datasets"].values()
                entries.append((entry, []))
            else:
                entries[-1][1].append(block["text"])
    return shown


FORMATS = _formats()


def test_every_format_of_annotation_files_is_shown() -> None:
    built_in = [entry for entry in registry.builders if entry.target.startswith("lavis_ds.")]
    assert set(FORMATS) == {entry.name for entry in built_in if issubclass(entry.load(), RecordsBuilder)}


@pytest.mark.parametrize(
    ("entry", "contents"),
    [shown for entries in FORMATS.values() for shown in entries],
    ids=[f"{name}-{number}" for name, entries in FORMATS.items() for number in range(len(entries))],
)
def test_the_entry_and_the_items_of_a_format_fit(tmp_path: Path, entry: dict[str, Any], contents: list[str]) -> None:
    files = entry["annotations"]["train"]
    files = files if isinstance(files, list) else [files]
    for name, content in zip(files, contents, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if "image_root" in entry:
        (tmp_path / entry["image_root"]).mkdir()
    options = {key: value for key, value in entry.items() if key != "builder"}
    samples = lavis_ds.load_dataset(entry["builder"], **options)["train"]
    documents = [json.loads(content) for content in contents]
    assert len(samples) >= (len(documents[0]) if isinstance(documents[0], list) else 1)
    assert all(any(turn.role == "assistant" for turn in sample.turns) for sample in samples)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry.builders, "_entries", dict(registry.builders._entries))
    monkeypatch.setattr(registry.builders, "_classes", dict(registry.builders._classes))
    yield
    sys.modules.pop("reviews", None)


@pytest.mark.usefixtures("_own_registry")
def test_the_new_builder_reads_its_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = list(BLOCK.finditer((PAGES / "dataset-builder.md").read_text()))
    (builder,) = (block["text"] for block in blocks if block["title"] == "reviews.py")
    (item,) = (block["text"] for block in blocks if block["language"] == "json")
    (script,) = (block["text"] for block in blocks if block["language"] == "python" and not block["title"])
    (tmp_path / "reviews.py").write_text(builder)
    (tmp_path / "data" / "photos").mkdir(parents=True)
    (tmp_path / "data" / "reviews.json").write_text(item)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}

    exec(compile(script, "dataset-builder.md", "exec"), names)

    sample: Conversation = names["samples"][0]
    assert sample.turns[0].content[2] == Text("The soup was cold.\nHow many stars?")
    assert sample.images == tuple(Image(str(tmp_path / "data" / "photos" / name)) for name in ("soup.jpg", "room.jpg"))
    assert (sample.turns[1].text, sample.references, sample.id) == ("2", {"answer": "2"}, "train/0:r1")


def test_the_new_builder_is_about_twenty_lines() -> None:
    (builder,) = (
        block["text"]
        for block in BLOCK.finditer((PAGES / "dataset-builder.md").read_text())
        if block["title"] == "reviews.py"
    )
    assert len([line for line in builder.splitlines() if line.strip()]) <= 22
