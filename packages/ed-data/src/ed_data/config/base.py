"""The base class of data options: frozen, and unknown keys are errors.

It resembles `ed_infra.options`, because this package imports no other package of the project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, LiteralString, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from ed_data.errors import KeyPath, did_you_mean


def _without_booleans(schema: object) -> Any:
    """Make every number of a schema reject booleans, which pydantic accepts as 0 and 1."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_without_booleans, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("int", "float"):
        return no_info_before_validator_function(_number, schema)  # type: ignore[arg-type]
    return {key: _without_booleans(value) for key, value in schema.items()}


def _number(value: object) -> object:
    if isinstance(value, bool):
        message = "must be a number, got {value}"
        raise PydanticCustomError("boolean", message, {"value": str(value).lower()})
    return value


class DataOptions(BaseModel):
    """Immutable options; `ALIASES = {"other spelling": "canonical field"}` in a subclass.

    Numbers accept neither booleans nor infinity.

    Raises:
        pydantic.ValidationError: contains each problem with the path of its key, so that the caller
            can report the line of a YAML file.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # Most commands use few of the classes, and building a validator needs milliseconds.
        defer_build=True,
    )

    ALIASES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _without_booleans(handler(source))

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        """Yield a key and a message for each violated rule about several keys."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _canonical_keys(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        result: dict[str, object] = {}
        problems: list[InitErrorDetails] = []
        for key, value in data.items():
            name = cls.ALIASES.get(key, key)
            if name not in cls.model_fields:
                hint = did_you_mean(key, [*cls.model_fields, *cls.ALIASES])
                problems.append(_problem((str(key),), f"unknown key {key!r}{hint}", "unknown_key"))
            elif name in result:
                message = f"{key!r} is an alias of {name!r}, which is also set: remove one of them"
                problems.append(_problem((str(key),), message, "duplicate_key"))
            else:
                result[name] = value
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return result

    @model_validator(mode="after")
    def _check_across_keys(self) -> Self:
        problems = [_problem(*problem, "wrong_key") for problem in self._problems()]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    def replace(self, **changes: object) -> Self:
        """Return a copy with changed fields; the whole copy is validated."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        values.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**values)


def _problem(path: KeyPath, message: str, kind: LiteralString) -> InitErrorDetails:
    # The message is a value of the template, because it may contain braces.
    error = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=path, input=None)
