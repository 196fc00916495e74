"""Names to classes: duplicates, wrong names, and that nothing is imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lavis_ds import registry
from lavis_ds.config.base import Config
from lavis_ds.errors import RegistryError
from lavis_ds.registry import Registry


@pytest.fixture
def parts() -> Registry[object]:
    return Registry("part")


def test_a_registered_class_is_found_and_handed_back(parts: Registry[object]) -> None:
    @parts.register("a")
    class A:
        class Config(Config):
            pass

    assert parts.get("a") is A
    assert parts.config_class("a") is A.Config
    assert "a" in parts
    assert "b" not in parts


def test_a_duplicate_prints_both_import_paths(parts: Registry[object]) -> None:
    @parts.register("a")
    class First:
        pass

    class Second:
        pass

    with pytest.raises(RegistryError) as caught:
        parts.register("a")(Second)
    place = f"{__name__}:test_a_duplicate_prints_both_import_paths.<locals>"
    assert f"the part name 'a' is taken by {place}.First; {place}.Second can't" in str(caught.value)
    assert parts.get("a") is First


def test_the_same_class_may_be_registered_again(parts: Registry[object]) -> None:
    def define(value: int) -> type:
        class A:
            number = value

        return A

    parts.register("a")(define(1))
    parts.register("a")(define(2))  # the module was imported again
    assert parts.get("a").number == 2  # type: ignore[attr-defined]


def test_a_declared_name_can_be_registered_by_its_own_class_only(parts: Registry[object]) -> None:
    parts.declare("a", f"{__name__}:Declared")
    with pytest.raises(RegistryError, match=f"taken by {__name__}:Declared"):
        parts.register("a")(Config)
    assert parts.register("a")(Declared) is Declared


def test_a_wrong_name_gets_the_nearest_and_the_list(parts: Registry[object]) -> None:
    for name in ("projector", "tower"):
        parts.declare(name, "x:Y")
    with pytest.raises(RegistryError) as caught:
        parts.get("projectr")
    text = "there is no part named 'projectr'. Expected: one of projector, tower. Did you mean 'projector'?"
    assert str(caught.value) == text
    with pytest.raises(RegistryError, match="lavis-ds list"):
        parts.get("zzz")


class Declared:
    class Config(Config):
        pass


class OtherConfig(Config):
    pass


def test_declared_parts_are_imported_when_they_are_asked_for(parts: Registry[object]) -> None:
    parts.declare("a", "no_such_module_xyz:A", f"{__name__}:OtherConfig")
    assert parts.names() == ["a"]
    assert [entry.target for entry in parts] == ["no_such_module_xyz:A"]
    assert parts.config_class("a") is OtherConfig  # of the options alone
    with pytest.raises(ModuleNotFoundError, match="no_such_module_xyz"):
        parts.get("a")


def test_without_a_config_path_the_class_is_asked(parts: Registry[object]) -> None:
    parts.declare("a", f"{__name__}:Declared")
    assert parts.config_class("a") is Declared.Config


def test_names_are_sorted(parts: Registry[object]) -> None:
    for name in "cab":
        parts.declare(name, f"x:{name}")
    assert parts.names() == ["a", "b", "c"]
    assert [entry.name for entry in parts] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_part_can_be_imported_with_its_options(kind: str) -> None:
    for entry in registry.KINDS[kind]:
        assert entry.load() is not None
        options = registry.KINDS[kind].config_class(entry.name)
        assert issubclass(options, Config)


def test_the_lists_that_lavis_users_know() -> None:
    assert "minigpt4qwen" in registry.list_models()
    assert "easy_vqa" in registry.list_datasets()
    assert "vqa" in registry.list_tasks()
    assert "blip2_image_train" in registry.list_processors()
    assert "train" in registry.list_runners()
    assert "linear_warmup_cosine_lr" in registry.list_lr_schedulers()
    assert registry.get_task_class("vqa").__name__ == "VQATask"


def test_import_lavis_ds_loads_no_heavy_library() -> None:
    code = (
        "import sys, lavis_ds; lavis_ds.registry.list_models(); "
        "print([m for m in ('torch', 'transformers', 'timm', 'deepspeed', 'pydantic', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
