from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from lavis_ds.data import cache, json_file
from lavis_ds.data.records import PackedItems, open_records, read_items
from lavis_ds.errors import ConfigError, DataError

ITEMS: list[dict[str, Any]] = [{"a": "é 😀", "b": [1, 2]}, {"a": "zwei\n], {", "b": []}, {"a": "", "b": None}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "cache"))


def _ipc_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ITEMS)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _ipc_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ITEMS)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path], object]] = {
    "plain.json": lambda path: path.write_text(json.dumps(ITEMS)),
    "indented.json": lambda path: path.write_text(json.dumps(ITEMS, indent=2, ensure_ascii=False) + "\n"),
    "bom.json": lambda path: path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ITEMS, ensure_ascii=False).encode()),
    "lines.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ITEMS))),
    "blank.ndjson": lambda path: path.write_text("\n" + "\n \n".join(map(json.dumps, ITEMS)) + "\n\n"),
    "windows.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, ITEMS)).encode()),
    "table.parquet": lambda path: datasets.Dataset.from_list(ITEMS).to_parquet(path),
    "file.arrow": _ipc_file,
    "stream.arrow": _ipc_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_items_come_back_from_every_container(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    records = open_records([str(tmp_path / name)])
    assert [records[index] for index in range(len(records))] == ITEMS
    with pytest.raises(IndexError):
        records[3]
    copy = pickle.loads(pickle.dumps(records))  # what a worker that is not forked gets
    assert copy[1] == ITEMS[1]
    assert copy.where(1) == records.where(1)


def test_files_are_joined_in_order_and_places_are_told(tmp_path: Path) -> None:
    for name in ("plain.json", "blank.ndjson", "table.parquet"):
        WRITERS[name](tmp_path / name)
    records = open_records([str(tmp_path / name) for name in ("plain.json", "blank.ndjson", "table.parquet")])
    assert [records[index] for index in range(len(records))] == ITEMS * 3
    places = [Path(records.where(index)).name for index in range(9)]
    assert places == [
        *[f"plain.json: item {i}" for i in range(3)],
        *[f"blank.ndjson: line {i}" for i in (2, 4, 6)],
        *[f"table.parquet: row {i}" for i in range(3)],
    ]


@pytest.mark.parametrize("name", ["plain.json", "lines.jsonl"])
def test_the_index_is_made_once_for_the_same_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[name](tmp_path / name)
    open_records([str(tmp_path / name)])
    made = []
    write = cache._write
    monkeypatch.setattr(cache, "_write", lambda *given: made.append(given) or write(*given))
    open_records([str(tmp_path / name)])
    assert made == []
    (tmp_path / name).write_text('[{"a": 1}]' if name.endswith(".json") else '{"a": 1}\n')
    assert [item for _, item in read_items(str(tmp_path / name))] == [{"a": 1}]
    assert len(made) == 1


def test_a_table_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for count in (1, 2):
        datasets.Dataset.from_list(ITEMS[:count]).to_parquet(path)
        assert [item for _, item in read_items(str(path))] == ITEMS[:count]


def test_json_lines_are_not_read_to_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    open_records([str(tmp_path / "a.jsonl")])
    parsed = []
    parse = json_file._parse
    monkeypatch.setattr(json_file, "_parse", lambda *given: parsed.append(given) or parse(*given))
    records = open_records([str(tmp_path / "a.jsonl")])
    assert (len(records), parsed) == (3, [])
    assert records[2] == {"a": 3}
    assert [data for data, _ in parsed] == [b'{"a": 3}\n']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "holds no items"),
        ("a.json", " [ ] ", "holds no items"),
        ("a.jsonl", "\n\n", "holds no items"),
        ("a.json", '{"a": 1}', "is no JSON list. Given: a JSON dict"),
        ("a.json", "[{}, 5]", "a.json: item 1: the item is no JSON object"),
        ("a.json", "[{},\n{]", "line 2, column 2"),
        ("a.json", "[{},", "this is no valid JSON: Expecting value"),
        ("a.json", "[{}", "this is no valid JSON: Expecting ',' delimiter"),
        ("a.json", "[{} {}]", "this is no valid JSON: Expecting ',' delimiter"),
        ("a.json", "[{}] {}", "this is no valid JSON: Extra data"),
        ("a.json", "{", "this is no valid JSON"),
        ("a.json", b'[{"a": "\xff"}]', "the text is no UTF-8"),
        ("a.jsonl", "{}\n{", "a.jsonl: line 2: this is no valid JSON"),
        ("a.jsonl", "{}\n[]", "a.jsonl: line 2: the item is no JSON object"),
        ("a.parquet", "PAR1", "the file can't be read"),
        ("a.arrow", "ARROW1", "the file can't be read"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        list(read_items(str(tmp_path / name)))
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_files_and_unknown_endings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json: there is no such annotation file"):
        open_records([str(tmp_path / "a.json")])
    with pytest.raises(ConfigError, match=r"a\.csv: .*Expected: \.json, \.jsonl"):
        open_records([str(tmp_path / "a.csv")])


def test_tables_say_which_package_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    original = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ConfigError, match=r"pip install 'lavis-ds\[parquet\]'"):
        open_records([str(tmp_path / "a.parquet")])


def test_packed_items_are_made_once(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text("{}")
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return iter(ITEMS)

    for _ in range(2):
        packed = PackedItems([str(source)], ["kind"], make)
        assert [packed[index] for index in range(len(packed))] == ITEMS
    assert len(made) == 1
    PackedItems([str(source)], ["another kind"], make)
    source.write_text("{ }")
    PackedItems([str(source)], ["kind"], make)
    assert len(made) == 3
