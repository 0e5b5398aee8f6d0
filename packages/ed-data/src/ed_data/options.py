"""The base of every table of data options: frozen, and an unknown key is an error.

A twin of `ed_infra.options`, because this package imports no other package of the project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ed_data.errors import did_you_mean


class Options(BaseModel):
    """Immutable options; `ALIASES = {"other spelling": "canonical field"}` in a subclass.

    Raises:
        pydantic.ValidationError: each problem with the path of its key, so that a caller who knows
            the source (YAML) can point at the line.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    ALIASES: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _canonical_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        result: dict[str, Any] = {}
        problems: list[InitErrorDetails] = []
        for key, value in data.items():
            name = cls.ALIASES.get(key, key)
            if name not in cls.model_fields:
                hint = did_you_mean(key, [*cls.model_fields, *cls.ALIASES])
                problems.append(_problem(key, value, "unknown_key", f"unknown key {key!r}{hint}"))
            elif name in result:
                message = f"{key!r} is another name of {name!r}, which is given too: keep one"
                problems.append(_problem(key, value, "duplicate_key", message))
            else:
                result[name] = value
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return result

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the result is validated as a whole."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        given.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**given)


def _problem(key: object, value: object, kind: str, message: str) -> InitErrorDetails:
    # Braces would be taken for a template by pydantic.
    text = message.replace("{", "{{").replace("}", "}}")
    error = PydanticCustomError(kind, text)  # type: ignore[arg-type]
    return InitErrorDetails(type=error, loc=(str(key),), input=value)
