"""`Options`: validated option classes, in which an unknown key is an error.

YAML sections, trainer arguments and engine settings are `Options`. This module uses pydantic, not
jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, LiteralString, Self, Unpack, cast

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

#: Seed of a random generator, in the common range of numpy and jax.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
#: A count of at least one, within int32.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: A count that may be zero.
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
#: A positive rate, factor or time in seconds.
Positive = Annotated[float, Field(gt=0, le=1e12)]
#: A weight or coefficient; 0 disables its term.
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
#: A fraction from 0 to 1, inclusive.
Fraction = Annotated[float, Field(ge=0, le=1)]
#: A dropout probability, below 1.
Dropout = Annotated[float, Field(ge=0, lt=1)]

#: Number of reported unknown keys, and of characters of each key in a message.
MAX_PROBLEMS, MAX_KEY = 8, 64

# Keys of pydantic's schemas that contain schemas.
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


def numbers_are_numbers(schema: object) -> Any:
    """Return a pydantic schema whose numbers reject true and false, which equal 1 and 0 in Python.

    A union with bool as an alternative accepts them.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(numbers_are_numbers(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("int", "float"):
        return core_schema.no_info_before_validator_function(_not_bool, cast(CoreSchema, schema))
    function = schema.get("function")
    if isinstance(function, dict) and function.get("function") is _not_bool:
        return schema  # of a nested class, which is already converted
    result = dict(schema)
    for key in _INNER & result.keys():
        value = result[key]
        if isinstance(value, dict) and key in ("fields", "choices"):  # name -> schema
            result[key] = {name: numbers_are_numbers(inner) for name, inner in value.items()}
        else:
            result[key] = numbers_are_numbers(value)
    return result


class NumbersAreNumbers:
    """An annotation with the effect of `numbers_are_numbers`, for types outside of `Options`."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return numbers_are_numbers(handler(source))


class Options(BaseModel):
    """Base class of options: immutable, without unknown keys, with aliases.

    A subclass sets `ALIASES = {"other spelling": "canonical field"}`. A field and its alias
    together are an error, even with equal values. `EQUIVALENT = {"name elsewhere": "what to use
    instead"}` explains names of other programs; a value may also be `"omit it: "` and the reason.
    A class also has the entries of its bases in both tables. Booleans are not valid numbers, and
    numbers must be finite (unless a field has `Field(allow_inf_nan=True)`). `Seed`, `Count`,
    `Whole`, `Positive`, `NotNegative`, `Fraction` and `Dropout` of this module are numbers with
    bounds.

    Raises:
        pydantic.ValidationError: Each problem with the path of its key, so that the YAML runner can
            report the line. At most `MAX_PROBLEMS` unknown keys of a class are reported.
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
    EQUIVALENT: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **settings: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**settings)
        for name in ("ALIASES", "EQUIVALENT"):
            tables = [vars(base).get(name, {}) for base in reversed(cls.__mro__)]
            setattr(cls, name, {key: value for table in tables for key, value in table.items()})

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
        data = cls._translate(data)
        result: dict[str, Any] = {}
        spelling: dict[str, Any] = {}
        problems: list[InitErrorDetails] = []
        for key, value in data.items():
            name = cls.ALIASES.get(key, key)
            if len(problems) == MAX_PROBLEMS:
                break
            if name not in cls.model_fields:
                message = f"unknown key {_shorten_key(key)!r}{cls._hint(str(key))}"
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

    @classmethod
    def _translate(cls, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return the options under the names of this class; a subclass may know other programs."""
        return data

    @classmethod
    def _hint(cls, key: str) -> str:
        """Return what to write instead of an unknown key, as the end of a sentence."""
        if key in cls.EQUIVALENT:
            instead = cls.EQUIVALENT[key]
            return f"; {instead}" if instead.startswith("omit it") else f"; use {instead}"
        return did_you_mean(key, [*cls.model_fields, *cls.ALIASES])

    def replace(self, **changes: object) -> Self:
        """Return a validated copy with some changed fields."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        values.update({self.ALIASES.get(name, name): value for name, value in changes.items()})
        return type(self)(**values)


def _shorten_key(key: object) -> object:
    return f"{key[:MAX_KEY]}..." if isinstance(key, str) and len(key) > MAX_KEY else key


def _problem(key: object, value: object, kind: LiteralString, message: str) -> InitErrorDetails:
    # As a value of the template: braces in a key are not fields.
    error = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=(str(key),), input=value)


def choice(kind: str, names: Iterable[str], aliases: Mapping[str, str] | None = None) -> Any:
    """Return a validator for a name from a list.

    Use it as `optimizer: Annotated[str, choice("optimizer", OPTIMIZERS)] = "adamw"`. Aliases become
    canonical names, and an unknown name is an error that suggests the nearest name.
    """
    known_names = tuple(names)
    alias_table = dict(aliases or {})

    def check(value: object) -> object:
        if not isinstance(value, str):
            return value
        raw_name = str(getattr(value, "value", value))
        name = alias_table.get(raw_name, raw_name)
        if name not in known_names:
            hint = did_you_mean(raw_name, [*known_names, *alias_table])
            raise PydanticCustomError(
                "unknown_name",
                "unknown {kind} {name}{hint} (known: {known})",
                {
                    "kind": kind,
                    "name": repr(raw_name),
                    "hint": hint,
                    "known": ", ".join(known_names),
                },
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


#: Validator for the name of a floating-point dtype, in any common spelling:
#: `dtype: Annotated[str, dtype_name] = "float32"`.
dtype_name = BeforeValidator(_check_dtype)


def explain_error(error: ValidationError) -> str:
    """Return one line for each problem of a validation error: `key.key: message`."""
    lines = []
    for problem in error.errors(include_url=False):
        location = ".".join(str(part) for part in problem["loc"])
        lines.append(f"{location}: {problem['msg']}" if location else problem["msg"])
    return "\n".join(lines)
