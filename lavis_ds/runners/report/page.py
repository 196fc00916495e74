"""HTML pages that load nothing: every text that comes from data is escaped, and the style is inside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_HERE = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """The page that a template makes of `values`; it may include `style.css`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def write(path: Path, text: str) -> Path:
    """Write a page, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)  # whoever has the page open never reads half of it
    return path
