"""A plain tree (what YAML gives) becomes a checked `Config`; every finding is reported at once."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lavis_ds.config.base import ComponentOf, Config
from lavis_ds.errors import ConfigError, did_you_mean

ConfigT = TypeVar("ConfigT", bound=Config)


def decode(config_class: type[ConfigT], tree: Mapping[str, Any], *, where: str = "") -> ConfigT:
    """Check `tree` against `config_class`.

    Raises:
        ConfigError: with one line for each unknown key, wrong type or bad value: key path, what was given, what is
            allowed, and the nearest name.
    """
    try:
        return config_class.model_validate(tree)
    except ValidationError as error:
        findings: dict[tuple[str, str], list[str]] = {}  # the members of a union complain each, about the same value
        for line in error.errors(include_url=False):
            path, message, given = _finding(config_class, tree, line, where)
            findings.setdefault((path, given), []).append(message)
        lines = (f"{path}: {_either(messages)}{given}" for (path, given), messages in findings.items())
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _either(messages: Sequence[str]) -> str:
    first, *others = dict.fromkeys(messages)
    joined = " or ".join([first, *(message.removeprefix("Input should be ") for message in others)])
    return joined if joined.endswith((".", "?")) else f"{joined}."


def _finding(config_class: type[Config], tree: Mapping[str, Any], line: Any, where: str) -> tuple[str, str, str]:
    """Key path, what is wrong, and what was given."""
    location = _keys(tree, line["loc"])
    path = ".".join(str(part) for part in ((where, *location) if where else location)) or "configuration"
    if line["type"] == "extra_forbidden":
        owner = _class_at(config_class, tree, location[:-1])
        known = list(owner.model_fields) if owner else []
        hint = did_you_mean(str(location[-1]), known) or (f"Known keys: {', '.join(known)}." if known else "")
        return path, f"there is no such key. {hint}".rstrip(), ""
    if line["type"] == "missing":
        owner = _class_at(config_class, tree, location[:-1])
        field = owner.model_fields.get(str(location[-1])) if owner else None
        about = f" ({field.description})" if field is not None and field.description else ""
        return path, f"this key is required{about} and was not given.", ""
    speaks_for_itself = line["type"] in {"component_without_name", "unknown_component"}
    whole_block = line["type"] == "value_error" and isinstance(line["input"], Mapping)
    given = "" if speaks_for_itself or whole_block else f" Given: {line['input']!r}."
    return path, str(line["msg"]).removeprefix("Value error, "), given


def _keys(tree: Any, location: Sequence[str | int]) -> tuple[str | int, ...]:
    """A location of pydantic without the tags it adds for members of a union, such as `constrained-int`."""
    keys: list[str | int] = []
    for part in location:
        is_key = isinstance(part, int) or (isinstance(tree, Mapping) and part in tree)
        if is_key or (str(part).isidentifier() and part not in {"int", "float", "str", "bool"}):
            keys.append(part)
            tree = _child(tree, part)
    return tuple(keys)


def _class_at(config_class: type[Config], tree: Any, location: Sequence[str | int]) -> type[Config] | None:
    """The options class that owns the mapping at `location`, following components by the name given in `tree`."""
    current: Any = config_class
    for part in location:
        tree = _child(tree, part)
        if not (isinstance(current, type) and issubclass(current, Config)):
            current = _element(current)
            metadata: Sequence[Any] = typing.get_args(current)[1:]
        else:
            field = current.model_fields.get(str(part))
            if field is None:
                return None
            current, metadata = field.annotation, field.metadata
        component = next((m for m in metadata if isinstance(m, ComponentOf)), None)
        if component is not None:
            try:
                current = component.config_class(tree)
            except PydanticCustomError:
                return None
        elif _is_union(current):
            current = _element(current)
    return current if isinstance(current, type) and issubclass(current, Config) else None


def _child(tree: Any, key: str | int) -> Any:
    """What stands at `key`; None where a validator, not the user, put something there."""
    try:
        return tree[key]
    except (KeyError, IndexError, TypeError):
        return None


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


def _element(annotation: Any) -> Any:
    """The type inside `dict[str, X]`, `list[X]` or `X | None`."""
    if _is_union(annotation):
        return next((a for a in typing.get_args(annotation) if a is not type(None)), None)
    arguments = typing.get_args(annotation)
    return arguments[-1] if arguments else None
