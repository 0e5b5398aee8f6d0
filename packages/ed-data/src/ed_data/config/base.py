"""The base of every table of data options: frozen, and an unknown key is an error.

A twin of `ed_infra.options`, because this package imports no other package of the project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from ed_data.errors import KeyPath, did_you_mean


def _without_booleans(schema: Any) -> Any:
    """Wrap every number of a schema: pydantic takes `true` for 1 otherwise."""
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


class Options(BaseModel):
    """Immutable options; `ALIASES = {"other spelling": "canonical field"}` in a subclass.

    Neither `true` nor infinity is a number.

    Raises:
        pydantic.ValidationError: each problem with the path of its key, so that a caller who knows
            the source (YAML) can point at the line.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    ALIASES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _without_booleans(handler(source))

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        """Yield the key to correct and a message for each broken rule across several keys."""
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
                message = f"{key!r} is another name of {name!r}, which is set too: keep one"
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

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the result is validated as a whole."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        values.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**values)


def _problem(path: KeyPath, message: str, kind: str) -> InitErrorDetails:
    # As a value of the template: braces in a key are not fields.
    error = PydanticCustomError(kind, "{message}", {"message": message})  # type: ignore[arg-type]
    return InitErrorDetails(type=error, loc=path, input=None)
