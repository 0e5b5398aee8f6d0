"""`Options`: validated sections of keys, in which a key that is not known is an error.

YAML sections, trainer arguments and engine settings are `Options`. Needs pydantic, not jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ed_infra.dtypes import canonical_dtype
from ed_infra.errors import ConfigError, did_you_mean


class Options(BaseModel):
    """Base of every table of options: immutable, no unknown key, old spellings accepted.

    A subclass sets `ALIASES = {"other spelling": "canonical field"}`. Giving a field and its alias
    together is an error, even with equal values.

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
        given: dict[str, Any] = {}
        problems: list[InitErrorDetails] = []
        for key, value in data.items():
            name = cls.ALIASES.get(key, key)
            if name not in cls.model_fields:
                hint = did_you_mean(str(key), [*cls.model_fields, *cls.ALIASES])
                problems.append(_problem(key, value, "unknown_key", f"unknown key {key!r}{hint}"))
            elif name in result:
                message = f"{given[name]!r} and {key!r} are two names of one option: keep one"
                problems.append(_problem(key, value, "duplicate_key", message))
            else:
                result[name] = value
                given[name] = key
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return result

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the result is validated as a whole."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        given.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**given)


def _problem(key: object, value: object, kind: str, message: str) -> InitErrorDetails:
    # As a value of the template: braces in a key are not fields.
    error = PydanticCustomError(kind, "{message}", {"message": message})  # type: ignore[arg-type]
    return InitErrorDetails(type=error, loc=(str(key),), input=value)


def choice(kind: str, names: Iterable[str], aliases: Mapping[str, str] | None = None) -> Any:
    """Make an annotation's validator for a name out of a list.

    Use as `optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"`: aliases become
    canonical names, and a name that is not known is an error with the nearest one.
    """
    known = tuple(names)
    other = dict(aliases or {})

    def check(value: object) -> object:
        if not isinstance(value, str):
            return value
        plain = str(getattr(value, "value", value))
        name = other.get(plain, plain)
        if name not in known:
            hint = did_you_mean(plain, [*known, *other])
            raise PydanticCustomError(
                "unknown_name",
                "unknown {kind} {name}{hint} (known: {known})",
                {"kind": kind, "name": repr(plain), "hint": hint, "known": ", ".join(known)},
            )
        return name

    return BeforeValidator(check)


def _check_dtype(value: object) -> object:
    if value is None:
        return None
    try:
        return canonical_dtype(value)
    except ConfigError as error:
        raise PydanticCustomError("unknown_dtype", "{why}", {"why": str(error)}) from None


#: Validator for a field that names a dtype: `dtype: Annotated[str, dtype_name] = "float32"`.
dtype_name = BeforeValidator(_check_dtype)


def explain(error: ValidationError) -> str:
    """Return one line for each problem of a validation error: `key.key: what is wrong`."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        lines.append(f"{where}: {problem['msg']}" if where else problem["msg"])
    return "\n".join(lines)
