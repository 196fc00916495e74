"""Paths become absolute, components come from their registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from lavis_ds.config.base import ComponentOf, Config, LocalPath, NamedConfig
from lavis_ds.registry import Registry


class Places(Config):
    one: LocalPath
    other: LocalPath | None = None


def test_local_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/someone")
    assert Places(one="data/../a.json").one == str(tmp_path / "a.json")
    assert Places(one="~/a.json").one == "/home/of/someone/a.json"
    assert Places(one="/a", other=None).other is None


PARTS: Registry[object] = Registry("part")


class BoltConfig(NamedConfig):
    name: str = "bolt"
    length: int = Field(3, ge=1)


@PARTS.register("bolt")
class Bolt:
    Config = BoltConfig


class Machine(Config):
    part: Annotated[NamedConfig, ComponentOf(PARTS)]


def test_component_by_mapping_by_name_or_ready_made() -> None:
    assert Machine.model_validate({"part": {"name": "bolt", "length": 5}}).part == BoltConfig(length=5)
    assert Machine.model_validate({"part": "bolt"}).part == BoltConfig()
    ready = BoltConfig(length=9)
    assert Machine(part=ready).part is ready


def test_component_is_dumped_with_the_options_of_its_own_class() -> None:
    assert Machine(part=BoltConfig(length=5)).model_dump() == {"part": {"name": "bolt", "length": 5}}
