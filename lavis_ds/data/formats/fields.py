"""Checked text fields of annotation items, shared by the formats. Every complaint names file, item and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis_ds.errors import DataError


def text_field(value: Any, field: str, where: str) -> str:
    """`value`, which must be a string.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, str):
        raise DataError(f"`{field}` is not text.", where=where, given=_short(value), expected="a string")
    return value


def required(item: Mapping[str, Any], field: str, where: str, expected: str = "a string") -> Any:
    """`item[field]`, which must be there. A null is as good as none: tables have one in every empty cell.

    Raises:
        DataError: it is not there; the fields that are there are named.
    """
    value = item.get(field)
    if value is None:
        there = ", ".join(name for name, value in item.items() if value is not None)
        raise DataError(f"`{field}` is missing.", where=where, given=f"fields {there or '(none)'}", expected=expected)
    return value


def required_text(item: Mapping[str, Any], field: str, where: str) -> str:
    """`item[field]`, which must be there and be a string."""
    return text_field(required(item, field, where), field, where)


def optional_text(item: Mapping[str, Any], field: str, where: str) -> str:
    """`item[field]`, which must be a string where it is there; else the empty string."""
    value = item.get(field)
    return "" if value is None else text_field(value, field, where)


def text_list(item: Mapping[str, Any], field: str, where: str) -> list[str]:
    """The turns in `item[field]`, which may be one string or a list of strings.

    Raises:
        DataError: the field is missing, empty or holds something else.
    """
    value = required(item, field, where, "a string or a list of strings")
    values = value if isinstance(value, list) else [value]
    if not values:
        raise DataError(f"`{field}` is an empty list.", where=where, expected="at least one turn")
    return [text_field(v, f"{field}[{i}]" if isinstance(value, list) else field, where) for i, v in enumerate(values)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
