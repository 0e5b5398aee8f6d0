"""Command line flags from option classes. Each field is a flag, validated by its class."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import ValidationError

OptionsT = TypeVar("OptionsT", bound=Options)


def add_options(parser: argparse.ArgumentParser, table: type[Options], title: str) -> None:
    """Add a flag for each field of a class: `max_model_len` becomes `--max-model-len VALUE`."""
    group = parser.add_argument_group(title)
    docs = documented(table)
    for name in table.model_fields:
        text = docs.get(name, "").replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", help=text, metavar="VALUE")


def documented(table: type[Options]) -> dict[str, str]:
    """Return the attribute docstrings of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[ast.unparse(field.target)] = " ".join(value.value.split())
    return docs


def options_of(values: argparse.Namespace, table: type[OptionsT]) -> OptionsT:
    """Return the options with the values of the flags.

    Raises:
        ConfigError: a value is invalid; the message names its flag.
    """
    written = {name: getattr(values, name) for name in table.model_fields}
    given = {name: plain(text) for name, text in written.items() if text is not None}
    for name, value in given.items():
        one = value is not None and not isinstance(value, list)
        if one and takes_several(table.model_fields[name].annotation):
            given[name] = [value]
    try:
        return table(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        flag = "--" + str(first["loc"][0]).replace("_", "-") + ": " if first["loc"] else ""
        raise ConfigError(f"{flag}{first['msg']}") from None


def takes_several(annotation: object) -> bool:
    """Return whether a type accepts a tuple."""
    return get_origin(annotation) is tuple or any(map(takes_several, get_args(annotation)))


def plain(text: str) -> Any:
    """Return the value of a flag: JSON, a comma-separated list of JSON values, or a string."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text in ("True", "False"):
        return text == "True"
    if "," in text:
        return [plain(part.strip()) for part in text.split(",") if part.strip()]
    return text


def mapping_of(text: str | None, flag: str) -> Mapping[str, Any]:
    """Return a mapping from JSON text; empty without a text.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is a JSON object, and cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is a JSON object, not {text!r}")
    return value
