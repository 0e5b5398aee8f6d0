"""`Options`: validated sections of keys, in which a key that is not known is an error.

YAML sections, trainer arguments and engine settings are `Options`. Needs pydantic, not jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ed_infra.dtypes import canonical_float
from ed_infra.errors import ConfigError, did_you_mean

#: Seed of a random generator, in the range that numpy and jax share.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
#: A number of things, at least one; an int32 index can count them.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: A number of things, perhaps none.
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
#: A rate, a factor, seconds: above 0.
Positive = Annotated[float, Field(gt=0, le=1e12)]
#: A weight, a coefficient: 0 turns it off.
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
#: A share of a whole, both ends included.
Fraction = Annotated[float, Field(ge=0, le=1)]
#: The probability of dropping something: dropping all of it would leave nothing.
Dropout = Annotated[float, Field(ge=0, lt=1)]

#: Unknown keys that a table reports, and the characters of each key in its message.
MAX_PROBLEMS, MAX_KEY = 8, 64

# Keys of pydantic's schemas under which there are schemas.
_INNER = frozenset(
    {
        *("schema", "items_schema", "keys_schema", "values_schema", "extras_schema"),
        *("choices", "fields", "definitions", "steps"),
        *("lax_schema", "strict_schema", "json_schema", "python_schema"),
    }
)


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "Input should be a number, not true or false")
    return value


def numbers_are_numbers(schema: Any) -> Any:
    """Return a pydantic schema whose numbers refuse true and false, which Python counts as 1 and 0.

    A union in which bool is an alternative still takes them.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(numbers_are_numbers(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("int", "float"):
        return core_schema.no_info_before_validator_function(_not_bool, cast(CoreSchema, schema))
    function = schema.get("function")
    if isinstance(function, dict) and function.get("function") is _not_bool:
        return schema  # of a nested table, which has been through this
    result = dict(schema)
    for key in _INNER & result.keys():
        value = result[key]
        if isinstance(value, dict) and key in ("fields", "choices"):  # name -> schema
            result[key] = {name: numbers_are_numbers(inner) for name, inner in value.items()}
        else:
            result[key] = numbers_are_numbers(value)
    return result


class NumbersAreNumbers:
    """Annotation with the effect of `numbers_are_numbers`, for types outside of `Options`."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return numbers_are_numbers(handler(source))


class Options(BaseModel):
    """Base of every table of options: immutable, no unknown key, old spellings accepted.

    A subclass sets `ALIASES = {"other spelling": "canonical field"}`. A field and its alias
    together are an error, even with equal values. A number is neither true nor false, and it is
    finite (unless a field says `Field(allow_inf_nan=True)`). `Seed`, `Count`, `Whole`, `Positive`,
    `NotNegative`, `Fraction` and `Dropout` of this module are numbers with bounds.

    Raises:
        pydantic.ValidationError: each problem with the path of its key, so that a caller who knows
            the source (YAML) can point at the line. At most `MAX_PROBLEMS` unknown keys of a table
            are reported.
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
        cls, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return numbers_are_numbers(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _canonical_keys(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        result: dict[str, Any] = {}
        spelling: dict[str, Any] = {}
        problems: list[InitErrorDetails] = []
        for key, value in data.items():
            name = cls.ALIASES.get(key, key)
            if len(problems) == MAX_PROBLEMS:
                break
            if name not in cls.model_fields:
                hint = did_you_mean(str(key), [*cls.model_fields, *cls.ALIASES])
                message = f"unknown key {_shortened(key)!r}{hint}"
                problems.append(_problem(key, value, "unknown_key", message))
            elif name in result:
                message = f"{spelling[name]!r} and {key!r} are two names of one option: keep one"
                problems.append(_problem(key, value, "duplicate_key", message))
            else:
                result[name] = value
                spelling[name] = key
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return result

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the result is validated as a whole."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        values.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**values)


def _shortened(key: object) -> object:
    return f"{key[:MAX_KEY]}..." if isinstance(key, str) and len(key) > MAX_KEY else key


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
        return canonical_float(value)
    except ConfigError as error:
        raise PydanticCustomError("unknown_dtype", "{why}", {"why": str(error)}) from None


#: Validator for a field that names a floating-point dtype, in any usual spelling:
#: `dtype: Annotated[str, dtype_name] = "float32"`.
dtype_name = BeforeValidator(_check_dtype)


def explain(error: ValidationError) -> str:
    """Return one line for each problem of a validation error: `key.key: message`."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        lines.append(f"{where}: {problem['msg']}" if where else problem["msg"])
    return "\n".join(lines)
