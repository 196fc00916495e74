"""Files and `--options` to one checked configuration, and back to YAML.

Layers, later ones win: model-type defaults, dataset defaults, the project's YAML, `--options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lavis_ds import plugins
from lavis_ds.config import legacy
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import ConfigError, did_you_mean

_DISCRIMINATORS = ("arch", "builder", "name")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and what a user should be told about how it came about.

    Attributes:
        config: the checked configuration.
        notices: one line for each old key that was translated.
    """

    config: RootConfig
    notices: tuple[str, ...]


def configs_dir() -> Path:
    """The folder with the shipped defaults: models/, datasets/, deepspeed/."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load(path: str | Path, options: Sequence[str] = ()) -> LoadedConfig:
    """Read, layer, translate and check a configuration.

    Args:
        path: the project's YAML file.
        options: overrides such as `run.init_lr=1e-4`.

    Raises:
        ConfigError: the file is missing or no YAML, or anything in it is wrong; every finding is listed.
    """
    project = _merge_options(read_yaml(Path(path)), options)
    project, notices = legacy.translate(project)
    project = plugins.load_all(project, Path(path).resolve().parent)
    return LoadedConfig(decode(RootConfig, _with_defaults(project)), tuple(notices))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain containers, not yet resolved.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(
            "there is no such file.",
            where=str(path),
            hint=did_you_mean(path.name, siblings) or "Check --cfg and the working directory.",
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not valid YAML: {' '.join(str(error).split())}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"this file holds no mapping of keys to values ({error}).", where=str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the file must hold a mapping with `model:`, `datasets:` and `run:`.",
            where=str(path),
            given=type(tree).__name__,
        )
    return {str(key): value for key, value in tree.items()}


def to_yaml(config: RootConfig) -> str:
    """The resolved configuration; passed back as `--cfg` it gives the same one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.model_dump(mode="json"))))


def _escaped(value: Any) -> Any:
    """`${` in a resolved value is text; unescaped it would be an interpolation when it is read again."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _merge_options(tree: dict[str, Any], options: Sequence[str]) -> dict[str, Any]:
    for option in options:
        key, equals, _ = option.partition("=")
        if not equals or not key:
            raise ConfigError(
                "an option must read key=value.",
                where="--options",
                given=repr(option),
                hint="For example run.init_lr=1e-4.",
            )
    run = tree.get("run")
    if options and isinstance(run, dict) and isinstance(run.get("deepspeed_config"), str):
        # else an option for a key inside would take the place of the whole preset
        tree = {**tree, "run": {**run, "deepspeed_config": {"preset": run["deepspeed_config"]}}}
    try:
        merged = OmegaConf.merge(OmegaConf.create(tree), OmegaConf.from_dotlist(list(options)))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split()), where="configuration") from error
    except TypeError as error:
        raise ConfigError(
            "an option gives a list where the file has a mapping, or the other way round.",
            where="--options",
            given=" ".join(options),
        ) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _with_defaults(project: dict[str, Any]) -> dict[str, Any]:
    tree = dict(project)
    if isinstance(tree.get("model"), dict):
        tree["model"] = model_tree(tree["model"])
    if isinstance(tree.get("datasets"), dict):
        tree["datasets"] = {name: dataset_tree(name, entry) for name, entry in tree["datasets"].items()}
    return tree


def model_tree(model: Mapping[str, Any]) -> dict[str, Any]:
    """A `model:` block on top of its type's defaults."""
    return _layer(_model_defaults(model), model)


def _model_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    arch, model_type = model.get("arch"), model.get("model_type")
    if not isinstance(arch, str) or model_type is None:
        return {}
    folder = configs_dir() / "models" / arch
    path = folder / f"{model_type}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.yaml"))
        raise ConfigError(
            f"model {arch!r} has no type {model_type!r}.",
            where="model.model_type",
            expected=f"one of {', '.join(known)}" if known else "no model_type, since this model has no named types",
            hint=did_you_mean(str(model_type), known),
        )
    return read_yaml(path)


def dataset_tree(name: str, entry: Any) -> Any:
    """An entry of `datasets:` on top of its builder's defaults; its own name is the builder's where none is named."""
    if entry is not None and not isinstance(entry, dict):
        return entry
    entry = {"builder": name, **(entry or {})}
    path = configs_dir() / "datasets" / f"{entry['builder']}.yaml"
    return _layer(read_yaml(path), entry) if path.is_file() else entry


def _layer(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`override` on top of `base`; a component of another name replaces the default one as a whole."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, str) and "name" in below:
            merged[key] = below if below["name"] == value else value
        elif isinstance(below, Mapping) and isinstance(value, Mapping) and not _other_component(below, value):
            merged[key] = _layer(below, value)
        else:
            merged[key] = value
    return merged


def _other_component(below: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether `value` names a part and `below` another one, or (a pair such as train and eval) none."""
    return any(key in value and below.get(key) != value[key] for key in _DISCRIMINATORS)
