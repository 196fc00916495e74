"""A project's own parts: file, package folder, module, entry point; and every way to get one wrong."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from lavis_ds import plugins, registry
from lavis_ds.errors import ConfigError, RegistryError

PART = """
from lavis_ds import registry
{imports}

@registry.register_projector("{name}")
class Part:
    pass
"""


@pytest.fixture(autouse=True)
def _forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    projectors = registry.projectors
    monkeypatch.setattr(projectors, "_entries", dict(projectors._entries))
    monkeypatch.setattr(projectors, "_classes", dict(projectors._classes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the configuration lies; not the working directory."""
    made = tmp_path / "project"
    made.mkdir()
    return made


def part(path: Path, name: str, imports: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PART.format(name=name, imports=imports))
    return path


def test_file_beside_the_configuration(folder: Path) -> None:
    path = part(folder / "parts.py", "in_file")
    tree = plugins.load_all({"plugins": "parts.py", "run": {}}, folder)
    assert "in_file" in registry.projectors
    assert tree == {"plugins": [str(path)], "run": {}}
    assert registry.projectors.get("in_file").__name__ == "Part"


def test_the_configurations_folder_comes_before_the_working_directory(folder: Path, tmp_path: Path) -> None:
    part(tmp_path / "parts.py", "in_working_directory")
    part(folder / "parts.py", "in_project")
    plugins.load_all({"plugins": ["parts.py"]}, folder)
    assert "in_project" in registry.projectors
    assert "in_working_directory" not in registry.projectors


def test_file_in_the_working_directory(folder: Path, tmp_path: Path) -> None:
    path = part(tmp_path / "elsewhere.py", "in_working_directory")
    assert plugins.load_all({"plugins": ["elsewhere.py"]}, folder)["plugins"] == [str(path)]
    assert "in_working_directory" in registry.projectors


def test_package_folder_with_relative_imports(folder: Path) -> None:
    part(folder / "my_parts" / "inner.py", "in_package")
    (folder / "my_parts" / "__init__.py").write_text("from . import inner\n")
    plugins.load_all({"plugins": ["./my_parts"]}, folder)
    assert "in_package" in registry.projectors


def test_module_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(folder / "lib" / "surely_mine.py", "in_module")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    assert plugins.load_all({"plugins": ["surely_mine"]}, folder)["plugins"] == ["surely_mine"]
    assert "in_module" in registry.projectors
    del sys.modules["surely_mine"]


def test_entry_point_of_an_installed_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(folder / "lib" / "surely_installed.py", "at_entry_point")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    point = importlib.metadata.EntryPoint("mine", "surely_installed", "lavis_ds.plugins")

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point] if group == "lavis_ds.plugins" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert plugins.load_all({"run": {}}, folder) == {"run": {}}
    assert "at_entry_point" in registry.projectors
    del sys.modules["surely_installed"]


def test_a_file_is_imported_once(folder: Path) -> None:
    count = folder / "count"
    (folder / "parts.py").write_text(f"open({str(count)!r}, 'a').write('x')\n")
    plugins.load_all({"plugins": ["parts.py", "./parts.py"]}, folder)
    plugins.load_all({"plugins": [str(folder / "parts.py")]}, folder)
    assert count.read_text() == "x"


def test_files_of_one_name_in_two_folders_are_two_plugins(folder: Path) -> None:
    part(folder / "a" / "parts.py", "part_of_a")
    part(folder / "b" / "parts.py", "part_of_b")
    plugins.load_all({"plugins": ["a/parts.py", "b/parts.py"]}, folder)
    assert {"part_of_a", "part_of_b"} <= set(registry.projectors.names())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import surely_absent_xyz", "module 'surely_absent_xyz', which is not installed"),
        ("def", "SyntaxError"),
    ],
)
def test_a_plugin_that_raises(content: str, message: str, folder: Path) -> None:
    (folder / "parts.py").write_text(content)
    for _ in range(2):  # a failed import leaves nothing half-made behind
        with pytest.raises(ConfigError, match=message) as caught:
            plugins.load_all({"plugins": ["parts.py"]}, folder)
        assert str(folder / "parts.py") in str(caught.value)
    assert caught.value.__cause__ is not None


def test_our_own_errors_pass_unchanged(folder: Path) -> None:
    part(folder / "parts.py", "mlp")
    with pytest.raises(RegistryError, match="'mlp' is taken by"):
        plugins.load_all({"plugins": ["parts.py"]}, folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["no_such.py"], "no such Python file or package.*project"),
        (["./no_such"], "no such Python file or package"),
        (["no_such_module_xyz"], "not installed"),
        (["./empty"], "neither a Python file nor a folder"),
        ({"a": 1}, "must be a list"),
        (3, "must be a list"),
    ],
)
def test_plugins_that_are_none(names: Any, message: str, folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        plugins.load_all({"plugins": names}, folder)
