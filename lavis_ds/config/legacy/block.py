"""One block of an old file while its keys are taken out, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lavis_ds.errors import ConfigError


class Log:
    """Lines about what became of old keys, and about those that ask for what there is not."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.refusals: list[str] = []


class Block:
    """One mapping of the tree while its old keys are taken out."""

    def __init__(self, where: str, values: dict[str, Any], log: Log) -> None:
        self.where, self.values, self.log = where, values, log

    def notice(self, key: str, text: str) -> None:
        self.log.notices.append(f"{self.where}.{key}: {text}")

    def refuse(self, key: str, text: str) -> None:
        self.log.refusals.append(f"{self.where}.{key}: {text}")

    def drop(self, table: dict[str, str]) -> None:
        for key, why in table.items():
            if key in self.values:
                del self.values[key]
                self.notice(key, why)

    def put(self, old: str, new: str, value: Any, note: str = "") -> None:
        """Give our key (dotted for a key inside a block) the value of an old one, and say so."""
        *blocks, name = new.split(".")
        target = self.values
        for block in blocks:
            target = open_block(target, block)
        if name in target and target[name] != value:
            self.notice(old, f"gives way to {self.where}.{new}: {target[name]}, which is given too.")
            return
        target[name] = value
        self.notice(old, f"is now {self.where}.{new}: {value}{f' ({note})' if note else ''}.")

    def move(self, old: str, new: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> None:
        if old in self.values:
            self.put(old, new, convert(self.values.pop(old)), note)

    def only(self, key: str, allowed: Any, otherwise: str) -> None:
        """Take out a key that may only say how it is anyway."""
        if key in self.values:
            value = self.values.pop(key)
            if value in (allowed, None):
                self.notice(key, f"no longer needed; {allowed} is how it is.")
            else:
                self.refuse(key, otherwise)

    def rename_value(self, key: str, old: tuple[str, ...], new: str) -> None:
        if self.values.get(key) in old:
            self.notice(key, f"{self.values[key]} is now {new}.")
            self.values[key] = new


def open_block(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The mapping under `name`, made where there is none; a part given by name alone becomes one."""
    inner = values.get(name)
    if isinstance(inner, str):
        inner = values[name] = {"name": inner}
    elif inner is None:
        inner = values[name] = {}
    if not isinstance(inner, dict):
        raise ConfigError("must be a mapping.", where=name, given=repr(inner))
    return inner


def whole(value: Any) -> int:
    """A number as YAML may write it, such as 2e3; 0 where it is none, which no key of ours accepts."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 0
