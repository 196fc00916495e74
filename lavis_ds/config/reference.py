"""Every key of a configuration with type, default and meaning, as `lavis-ds show-config --help-keys` prints it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from lavis_ds import registry
from lavis_ds.config.base import ComponentOf, Config
from lavis_ds.config.schema import RunConfig

_SECTIONS = {
    "model": registry.models,
    "vision encoder": registry.vision_encoders,
    "projector": registry.projectors,
    "language model": registry.language_models,
    "dataset": registry.builders,
    "processor": registry.processors,
    "task": registry.tasks,
}


def text() -> str:
    """The reference as Markdown: a table for `run:` and one for each registered part's options."""
    sections = [f"## `run:`\n\n{_table(RunConfig)}"]
    for title, parts in _SECTIONS.items():
        for entry in parts:
            options = parts.config_class(entry.name)
            about = inspect.getdoc(options) or ""
            sections.append(
                f"## {title} `{entry.name}`\n\n{about.splitlines()[0] if about else ''}\n\n{_table(options)}"
            )
    return "\n\n".join(sections) + "\n"


def _table(options: type[Config]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join(
        rows + [f"| `{name}` | {kind} | {default} | {meaning} |" for name, kind, default, meaning in _rows(options)]
    )


def _rows(options: type[Config]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in options.model_fields.items():
        yield name, _type(field), _default(field), (field.description or "").replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    component = next((m for m in field.metadata if isinstance(m, ComponentOf)), None)
    if component is not None:
        return f"{component.registry.kind} by name"
    annotation: Any = field.annotation
    shown = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    shown = re.sub(r"typing\.|lavis_ds\.config\.\w+\.|Annotated\[(\w+), [^\]]*\]+", lambda m: m.group(1) or "", shown)
    return shown.replace("|", "or").replace("NoneType", "null").replace("None", "null")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Config):
        return "see its own table"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"
