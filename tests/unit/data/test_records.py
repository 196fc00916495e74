from __future__ import annotations

import json
from pathlib import Path

import pytest

from lavis_ds.data.records import JsonRecords, read_items
from lavis_ds.errors import DataError


def test_records_come_back_as_they_were_from_one_block_of_bytes() -> None:
    values = [{"a": "é\ud83d"}, {}, {"b": [1, 2.5, None]}]
    records = JsonRecords(iter(values))
    assert len(records) == 3
    assert [records[i] for i in range(3)] == values
    assert records._bytes.nbytes == sum(len(json.dumps(v, separators=(",", ":"))) for v in values)
    with pytest.raises(IndexError):
        records[3]


def test_json_and_json_lines_hold_the_same_items(tmp_path: Path) -> None:
    items = [{"a": 1}, {"a": "zwei\n"}]
    (tmp_path / "a.json").write_text(json.dumps(items, indent=1))
    (tmp_path / "a.jsonl").write_text("\n" + "\n\n".join(json.dumps(item) for item in items) + "\n")
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(items).encode())
    assert [item for _, item in read_items(str(tmp_path / "a.json"))] == items
    assert [item for _, item in read_items(str(tmp_path / "bom.json"))] == items
    assert [(place.rsplit(": ")[1], item) for place, item in read_items(str(tmp_path / "a.jsonl"))] == [
        ("line 2", items[0]),
        ("line 4", items[1]),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "holds no items"),
        ("a.json", "[]", "holds no items"),
        ("a.jsonl", "\n\n", "holds no items"),
        ("a.json", '{"a": 1}', "is no JSON list"),
        ("a.json", "[{}, 5]", "a.json: item 1: the item is no JSON object"),
        ("a.json", "[{},\n{]", "line 2, column 2"),
        ("a.jsonl", "{}\n{", "a.jsonl: line 2: this is no valid JSON"),
        ("a.jsonl", "{}\n[]", "a.jsonl: line 2: the item is no JSON object"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        list(read_items(str(tmp_path / name)))
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such annotation file"):
        list(read_items(str(tmp_path / "a.json")))
