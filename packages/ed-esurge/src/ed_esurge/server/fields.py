"""Building blocks of the request models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator

from ed_esurge.server.errors import Refusal

# A JSON schema that clients send: it is walked in Python, and compiled.
MAX_SCHEMA_DEPTH, MAX_SCHEMA_ITEMS, MAX_SCHEMA_CHARACTERS = 32, 4096, 2**17


def few(count: int) -> BeforeValidator:
    """A limit that is checked before the items of a list or an object are."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > count:
            raise Refusal(f"has {len(value)} items, and this server takes {count} at most")
        return value

    return BeforeValidator(check)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def unsupported(why: str, *harmless: object) -> Any:
    """A field that is refused unless its value asks for nothing (`None` or one of `harmless`)."""

    def check(value: object) -> object:
        if value is None or value in harmless:
            return None
        raise Refusal(f"not supported by this server: {why}")

    return Annotated[Any, PlainValidator(check)]


def or_default(default: Any) -> Callable[[object], object]:
    """OpenAI's clients send `null` for "the default"."""
    return lambda value: default if value is None else value


def _schema(value: object) -> object:
    """Limit what a schema may hold, before anybody walks it."""
    if not isinstance(value, Mapping):
        return value
    items = characters = 0
    todo: list[tuple[object, int]] = [(value, 1)]
    while todo:
        here, depth = todo.pop()
        items += 1
        characters += len(here) if isinstance(here, str) else 0
        if depth > MAX_SCHEMA_DEPTH:
            raise Refusal(f"is deeper than the {MAX_SCHEMA_DEPTH} levels that this server takes")
        if items > MAX_SCHEMA_ITEMS or characters > MAX_SCHEMA_CHARACTERS:
            raise Refusal(
                f"is larger than this server takes: {MAX_SCHEMA_ITEMS} items, "
                f"{MAX_SCHEMA_CHARACTERS} characters"
            )
        if isinstance(here, Mapping):
            characters += sum(map(len, here))
            todo += [(item, depth + 1) for item in here.values()]
        elif isinstance(here, list):
            todo += [(item, depth + 1) for item in here]
    return value


Schema = Annotated[dict[str, Any], BeforeValidator(_schema)]
