"""`Config`, the base of every options class, and the field type that picks a registered part by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lavis_ds.errors import RegistryError
from lavis_ds.registry import Registry


class Config(BaseModel):
    """Options of one part: typed, frozen, unknown keys refused.

    Subclass it beside (or inside) the class it configures; give every field a `Field(..., description=...)` that says
    what it means and its unit. The descriptions are what `lavis-ds show-config --help-keys` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class NamedConfig(Config):
    """Options of a part that is picked by name."""

    name: str


@dataclass(frozen=True)
class ComponentOf:
    """Annotation of a field that holds the options of a registered part.

    The value is a mapping whose discriminator key (`name`, `arch`, ...) chooses the options class, or just the name.
    """

    registry: Registry[Any]

    def config_class(self, value: Any) -> type[Config]:
        """The options class that `value` asks for.

        Raises:
            PydanticCustomError: no name is given, or nothing has that name.
        """
        key = self.registry.discriminator
        name = value.get(key) if isinstance(value, Mapping) else value
        if not isinstance(name, str):
            raise PydanticCustomError(
                "component_without_name",
                "{message}",
                {"message": f"`{key}` must name a {self.registry.kind}: one of {', '.join(self.registry.names())}"},
            )
        try:
            return self.registry.config_class(name)
        except RegistryError as error:
            raise PydanticCustomError("unknown_component", "{message}", {"message": str(error)}) from None

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        config_class = self.config_class(value)
        return config_class.model_validate({self.registry.discriminator: value} if isinstance(value, str) else value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda v: v.model_dump()),
        )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


LocalPath = Annotated[str, AfterValidator(_absolute)]
"""A path on this machine. Relative ones are taken from the working directory and stored absolute."""
