"""Types and common fields of the request models, and the policy for unknown fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from ed_esurge.config import UnknownFields
from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.http.errors import InvalidField, from_validation

logger = logging.getLogger(__name__)

#: Key of the scope for the `IgnoredKeys` of a request.
IGNORED_KEYS = "ed_esurge.ignored_keys"
#: Header of an answer with the ignored keys of its request.
HEADER = "X-Ignored-Fields"
#: Header of an answer with the tools that this server cannot execute, which the model does not see.
TOOLS_HEADER = "X-Omitted-Tools"
# Limits of that header: number and length of the keys; limit of the keys that are logged once.
MAX_NAMED, MAX_CHARACTERS, MAX_LOGGED = 8, 64, 1024


class IgnoredKeys:
    """The unknown keys of one request.

    Args:
        policy: "refuse" makes an unknown key an error.
    """

    def __init__(self, policy: UnknownFields) -> None:
        self.policy = policy
        self._names: dict[str, None] = {}
        self._more = 0
        self._tools: dict[str, None] = {}

    @property
    def refuses(self) -> bool:
        """Whether an unknown key is an error."""
        return self.policy == "refuse"

    def add(self, key: object) -> None:
        """Add an ignored key."""
        if len(self._names) < MAX_NAMED:
            self._names[_printable(str(key)[: MAX_CHARACTERS + 1])] = None
        elif key not in self._names:
            self._more += 1

    def add_tool(self, kind: str) -> None:
        """Add the type of a tool that the model does not see."""
        if len(self._tools) < MAX_NAMED:
            self._tools[_printable(kind)] = None

    @property
    def tools_header(self) -> str | None:
        """The value of `X-Omitted-Tools`; None = no such header."""
        return ", ".join(self._tools) or None

    @property
    def names(self) -> list[str]:
        """The first ignored keys, cut to `MAX_CHARACTERS`."""
        return [*self._names]

    @property
    def header(self) -> str | None:
        """The value of `X-Ignored-Fields`; None = no such header."""
        if self.policy != "warn" or not self._names:
            return None
        more = f" (and {self._more} more)" if self._more else ""
        return ", ".join(self._names) + more


def _printable(text: str) -> str:
    """Return a text for headers and the log: ASCII without control characters."""
    escaped_text = text[:MAX_CHARACTERS].encode("ascii", "backslashreplace").decode()
    ascii_text = "".join(char if " " <= char <= "~" else "?" for char in escaped_text)[
        :MAX_CHARACTERS
    ]
    return ascii_text + "..." if len(text) > MAX_CHARACTERS else ascii_text


class UnknownFieldsPolicy:
    """The policy of a server for unknown fields. Each ignored key is logged once.

    Raises:
        ConfigError: the policy is unknown.
    """

    def __init__(self, policy: str = "warn") -> None:
        if policy not in get_args(UnknownFields):
            policies = ", ".join(get_args(UnknownFields))
            raise ConfigError(f"unknown_fields={policy!r} is unknown: choose one of {policies}")
        self.policy: UnknownFields = cast(UnknownFields, policy)
        self._logged: set[str] = set()

    def request(self) -> IgnoredKeys:
        """Return the collector of a new request."""
        return IgnoredKeys(self.policy)

    def log(self, ignored: IgnoredKeys, path: str) -> None:
        """Log the new keys of a request."""
        if ignored.header is None:
            return
        for name in ignored.names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("%s: the unknown request field %s is ignored", path, name)


# Limits of a JSON schema in a request, which Python code traverses and the engine compiles.
MAX_SCHEMA_DEPTH, MAX_SCHEMA_ITEMS, MAX_SCHEMA_CHARACTERS = 32, 4096, 2**17


class RequestBody(Options):
    """Base of all request models.

    `null` is the default of an optional field. An unknown key is an error, unless the context of
    the validation is an `IgnoredKeys` with another policy, which receives the key.
    """

    HISTORY: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls_and_unknown(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, Mapping):
            return data
        noted = info.context if isinstance(info.context, IgnoredKeys) else None
        refuses = not cls.HISTORY and (noted is None or noted.refuses)
        result = {}
        for key, value in data.items():
            field = cls.model_fields.get(cls.ALIASES.get(key, key))
            if field is None:
                if refuses:
                    result[key] = value  # `Options` refuses the key
                elif noted is not None and not cls.HISTORY:
                    noted.add(key)
            elif value is not None or field.is_required():
                result[key] = value
        return result

    def get_set_fields(self, *names: str) -> dict[str, Any]:
        """Return the values of those fields that the request contains."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


def omit_tool(info: ValidationInfo, kind: str) -> None:
    """Note a tool that this server cannot execute for the header of the answer."""
    if isinstance(info.context, IgnoredKeys):
        info.context.add_tool(kind)


class History(RequestBody):
    """Base of the models of a conversation: messages, their parts, calls, items.

    Clients append complete answers to the conversation, with additional keys of the client or of
    another server. Unknown keys are therefore always ignored.
    """

    HISTORY = True


_BodyT = TypeVar("_BodyT", bound=Options)


def validate_body(kind: type[_BodyT], body: object, ignored: IgnoredKeys | None = None) -> _BodyT:
    """Return a parsed body as a request model.

    Args:
        ignored: receives the unknown keys; None = unknown keys are errors.

    Raises:
        APIError: 400, with the invalid field in the spelling of the client.
    """
    try:
        return kind.model_validate(body, context=ignored)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False), body) from None


def few(count: int) -> BeforeValidator:
    """Return a limit of the items of a list or object, which is checked before the items."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > count:
            raise InvalidField(f"has {len(value)} items, and the limit of this server is {count}")
        return value

    return BeforeValidator(check)


#: OpenAI's limits of `metadata`: number of pairs, and lengths of keys and values.
MAX_PAIRS, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
MetadataKey = Annotated[str, Field(max_length=MAX_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=MAX_VALUE_CHARACTERS)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], few(MAX_PAIRS)]
# Fields about the client or its program, which have no effect.
ClientText = Annotated[str, Field(max_length=4096)]
ClientData = Annotated[dict[str, Any], few(64)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def reject_field(reason: str, *harmless: object, code: str | None = None) -> PlainValidator:
    """Return the check of a field that must be `None` or one of `harmless`.

    Args:
        reason: reason for the error message.
        code: code of the error, if clients know one.
    """

    def check(value: object) -> object:
        if value is None or value in harmless:
            return None
        raise InvalidField(f"not supported by this server: {reason}", code=code)

    return PlainValidator(check)


def check_part_types(*kinds: str) -> BeforeValidator:
    """Return a check of the types of a message's parts, whose error names the part."""

    def check(value: object) -> object:
        for place, part in enumerate(value if isinstance(value, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                field = kind[:64] if kind in part else "type"
                raise InvalidField(
                    f"a part of type {kind!r:.64} is not supported: use {', '.join(kinds)}",
                    f"[{place}].{field}",
                )
        return value

    return BeforeValidator(check)


def _schema(value: object) -> object:
    """Check the limits of a schema."""
    if not isinstance(value, Mapping):
        return value
    items = characters = 0
    todo: list[tuple[object, int]] = [(value, 1)]
    while todo:
        node, depth = todo.pop()
        items += 1
        characters += len(node) if isinstance(node, str) else 0
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidField(
                f"is deeper than {MAX_SCHEMA_DEPTH} levels, the limit of this server"
            )
        if items > MAX_SCHEMA_ITEMS or characters > MAX_SCHEMA_CHARACTERS:
            raise InvalidField(
                f"is larger than the limit of this server: {MAX_SCHEMA_ITEMS} items, "
                f"{MAX_SCHEMA_CHARACTERS} characters"
            )
        if isinstance(node, Mapping):
            characters += sum(map(len, node))
            todo += [(item, depth + 1) for item in node.values()]
        elif isinstance(node, list):
            todo += [(item, depth + 1) for item in node]
    return value


JsonSchema = Annotated[dict[str, Any], BeforeValidator(_schema)]


def _parse_schema(value: object) -> object:
    """Parse a schema that is JSON text."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_CHARACTERS:
        raise InvalidField(
            f"is longer than {MAX_SCHEMA_CHARACTERS} characters, the limit of a schema"
        )
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidField(f"is not a JSON schema: {error}") from None


#: A schema, or its JSON text; the limits of `JsonSchema` hold for both.
SchemaOrText = Annotated[dict[str, Any], BeforeValidator(_schema), BeforeValidator(_parse_schema)]


class LlamaSamplers(RequestBody):
    """Samplers of llama.cpp, with its names; the meanings are those of `SamplingParams`."""

    typical_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_n_sigma: Annotated[float | None, Field(ge=-1, le=1e6)] = None
    xtc_probability: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    dry_multiplier: Annotated[float | None, Field(ge=0, le=1e6)] = None
    dry_base: Annotated[float | None, Field(ge=1, le=1e6)] = None
    dry_allowed_length: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    dry_penalty_last_n: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    dry_sequence_breakers: Annotated[list[Word] | None, few(MAX_STOPS)] = None
    mirostat: Annotated[int | None, Field(ge=0, le=2)] = None
    mirostat_tau: Annotated[float | None, Field(ge=0, le=100)] = None
    mirostat_eta: Annotated[float | None, Field(ge=0, le=1)] = None


#: Names of these fields.
LLAMA_SAMPLERS = tuple(LlamaSamplers.model_fields)


def _stops(value: object) -> object:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and any(stop == "" for stop in stops):
        raise InvalidField("an empty stop string would end every answer immediately")
    return stops


Stops = Annotated[list[Word], BeforeValidator(_stops), few(MAX_STOPS)]
