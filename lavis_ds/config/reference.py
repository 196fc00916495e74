"""Every key of a configuration with type, default and meaning, as `lavis-ds show-config --help-keys` prints it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from lavis_ds import registry
from lavis_ds.config.base import ComponentOf, Config
from lavis_ds.config.schema import RootConfig, RunConfig

_SECTIONS = {
    "model": registry.models,
    "vision encoder": registry.vision_encoders,
    "projector": registry.projectors,
    "language model": registry.language_models,
    "dataset": registry.builders,
    "processor": registry.processors,
    "task": registry.tasks,
    "runner": registry.runners,
}

Row = tuple[str, str, str, str]
"""Key, type, default, meaning."""


def text() -> str:
    """The reference as Markdown: a table for the file, one for `run:`, and one for each registered part's options."""
    sections = [f"## the file\n\n{_table(_rows_of_file())}", f"## `run:`\n\n{_table(_rows(RunConfig))}"]
    for title, parts in _SECTIONS.items():
        for entry in parts:
            options = parts.config_class(entry.name)
            about = inspect.getdoc(options) or ""
            sections.append(
                f"## {title} `{entry.name}`\n\n{about.splitlines()[0] if about else ''}\n\n{_table(_rows(options))}"
            )
    return "\n\n".join(sections) + "\n"


def _rows_of_file() -> Iterator[Row]:
    """The blocks; what is in them has tables of its own."""
    return (row for row in _rows(RootConfig) if "." not in row[0])


def _table(options: Iterator[Row]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join(
        rows + [f"| `{name}` | {kind} | {default} | {meaning} |" for name, kind, default, meaning in options]
    )


def _rows(options: type[Config], prefix: str = "") -> Iterator[Row]:
    for name, field in options.model_fields.items():
        kind = _kind(field.annotation, field.metadata).replace("|", "or")
        yield f"{prefix}{name}", kind, _default(field), (field.description or "registered name").replace("|", "\\|")
        for between, inner in _blocks(field.annotation) if _component(field.metadata) is None else ():
            yield from _rows(inner, f"{prefix}{name}.{between}")


def _component(metadata: Sequence[Any]) -> ComponentOf | None:
    return next((m for m in metadata if isinstance(m, ComponentOf)), None)


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type in words."""
    component = _component(metadata)
    if component is not None:
        return f"{component.registry.kind} by name"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_kind, arguments))}]"
    if annotation in (None, types.NoneType):
        return "null"
    if annotation is Any:
        return "any"
    return "mapping" if issubclass(annotation, Config) else str(annotation.__name__)


def _blocks(annotation: Any) -> Iterator[tuple[str, type[Config]]]:
    """Options classes inside a field's type, and what stands between the field's key and theirs."""
    arguments = typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield "", annotation
    elif typing.get_origin(annotation) is dict:
        yield from (("<name>." + between, inner) for between, inner in _blocks(arguments[1]))
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for argument in arguments:
            yield from _blocks(argument)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Config):
        return "see below"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
