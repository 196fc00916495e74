"""A project's own parts: Python files, packages or modules named under `plugins:`, and installed entry points."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lavis_ds.errors import ConfigError, LavisError

ENTRY_POINT_GROUP = "lavis_ds.plugins"


def load_all(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Import every plugin, so that the names they register are known.

    Args:
        tree: the configuration; `plugins` in it is a name or a list of names.
        folder: where the configuration file lies; relative paths start here.

    Returns:
        The tree with the plugins' paths made absolute.

    Raises:
        ConfigError: a plugin is not found, or raises when it is imported.
    """
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        _run(entry_point.load, entry_point.value)
    if "plugins" not in tree:
        return tree
    names = tree["plugins"]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        raise ConfigError("this must be a list of Python files or modules.", where="plugins", given=repr(names))
    return {**tree, "plugins": [_load(str(name), folder) for name in names]}


def _load(name: str, folder: Path) -> str:
    if not name.endswith(".py") and "/" not in name:
        _run(lambda: importlib.import_module(name), name)
        return name
    candidates = [folder / name, Path.cwd() / name]
    path = next((p.resolve() for p in candidates if p.exists()), None)
    if path is None:
        raise ConfigError(
            "there is no such Python file or package.",
            where="plugins",
            given=name,
            hint=f"Paths are relative to the configuration's folder ({folder}) or the working directory.",
        )
    _run(lambda: _import_file(path), str(path))
    return str(path)


def _import_file(path: Path) -> None:
    source = path / "__init__.py" if path.is_dir() else path
    digest = hashlib.sha1(str(source).encode(), usedforsecurity=False).hexdigest()[:8]
    name = f"lavis_ds_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return
    search = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=search)
    if spec is None or spec.loader is None or not source.is_file():
        raise ConfigError(
            "this is neither a Python file nor a folder with __init__.py.", where="plugins", given=str(path)
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _run(load: Any, name: str) -> None:
    try:
        load()
    except LavisError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the plugin needs the module {error.name!r}, which is not installed.", where="plugins", given=name
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the plugin raised {type(error).__name__}: {error}",
            where="plugins",
            given=name,
            hint="Use --debug for the traceback.",
        ) from error
