"""Names to classes: one typed registry a kind of part, and the decorators that fill them.

Built-in parts are declared by import path and imported when first asked for, so listing names or reading a
configuration loads no torch. A project registers its own with the same decorators LAVIS has::

    from lavis_ds import registry

    @registry.register_projector("gated")
    class GatedProjector(Projector): ...

A part's options are a `Config` class: the attribute `Config` of the registered class.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lavis_ds.errors import RegistryError, did_you_mean

if TYPE_CHECKING:
    from lavis_ds.config.base import Config

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """One registered name: where its class and its options are found."""

    name: str
    target: str
    config: str | None

    def load(self) -> Any:
        return _load(self.target)


def _load(path: str) -> Any:
    module_name, _, qualname = path.partition(":")
    value: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    for attribute in qualname.split("."):
        value = getattr(value, attribute)
    return value


class Registry(Generic[T]):
    """Names of one kind of part.

    Args:
        kind: the word used in messages, such as `projector`.
        discriminator: the configuration key that holds the name, such as `name` or `arch`.
    """

    def __init__(self, kind: str, discriminator: str = "name") -> None:
        self.kind = kind
        self.discriminator = discriminator
        self._entries: dict[str, Entry] = {}
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator that registers a class under `name`.

        Raises:
            RegistryError: another class already has the name; both import paths are printed.
        """

        def decorate(cls: C) -> C:
            target = f"{cls.__module__}:{cls.__qualname__}"
            existing = self._entries.get(name)
            if existing is not None and existing.target != target:
                raise RegistryError(
                    f"the {self.kind} name {name!r} is taken by {existing.target}; {target} can't have it too.",
                    hint="Choose another name.",
                )
            self._entries[name] = Entry(name, target, existing.config if existing else None)
            self._classes[name] = cls
            return cls

        return decorate

    def declare(self, name: str, target: str, config: str | None = None) -> None:
        """Register `module:Class` without importing it; `config` names its options class the same way."""
        self._entries[name] = Entry(name, target, config)

    def entry(self, name: str) -> Entry:
        """The entry of `name`.

        Raises:
            RegistryError: nothing has that name; the closest ones and the full list are printed.
        """
        if name not in self._entries:
            raise RegistryError(
                f"there is no {self.kind} named {name!r}.",
                expected=f"one of {', '.join(self.names())}",
                hint=did_you_mean(str(name), self._entries) or f"See `lavis-ds list` for every {self.kind}.",
            )
        return self._entries[name]

    def get(self, name: str) -> type[T]:
        """The class registered under `name`, imported now if it was only declared."""
        entry = self.entry(name)
        if name not in self._classes:
            self._classes[name] = entry.load()
        return self._classes[name]

    def config_class(self, name: str) -> type[Config]:
        """The options class of `name`, without importing the part itself where that is possible."""
        entry = self.entry(name)
        config: type[Config] = _load(entry.config) if entry.config else self.get(name).Config  # type: ignore[attr-defined]
        return config

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return (self._entries[name] for name in self.names())


models: Registry[Any] = Registry("model", "arch")
vision_encoders: Registry[Any] = Registry("vision encoder")
projectors: Registry[Any] = Registry("projector")
language_models: Registry[Any] = Registry("language model")
builders: Registry[Any] = Registry("dataset builder", "builder")
processors: Registry[Any] = Registry("processor")
tasks: Registry[Any] = Registry("task")
runners: Registry[Any] = Registry("runner")
engines: Registry[Any] = Registry("engine")
lr_schedulers: Registry[Any] = Registry("lr scheduler")

register_model = models.register
register_vision_encoder = vision_encoders.register
register_projector = projectors.register
register_language_model = language_models.register
register_builder = builders.register
register_processor = processors.register
register_task = tasks.register
register_runner = runners.register
register_engine = engines.register
register_lr_scheduler = lr_schedulers.register

get_model_class = models.get
get_builder_class = builders.get
get_processor_class = processors.get
get_task_class = tasks.get
get_runner_class = runners.get
get_lr_scheduler_class = lr_schedulers.get

KINDS: dict[str, Registry[Any]] = {
    "models": models,
    "vision_encoders": vision_encoders,
    "projectors": projectors,
    "language_models": language_models,
    "builders": builders,
    "processors": processors,
    "tasks": tasks,
    "runners": runners,
    "engines": engines,
    "lr_schedulers": lr_schedulers,
}


def list_models() -> list[str]:
    return models.names()


def list_datasets() -> list[str]:
    return builders.names()


def list_tasks() -> list[str]:
    return tasks.names()


def list_processors() -> list[str]:
    return processors.names()


def list_runners() -> list[str]:
    return runners.names()


def list_lr_schedulers() -> list[str]:
    return lr_schedulers.names()
