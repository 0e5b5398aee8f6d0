"""Flags of the command line from tables of options: each field is one, checked by its table."""

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
    """A flag for each field of a table: `max_model_len` becomes `--max-model-len VALUE`."""
    group = parser.add_argument_group(title)
    docs = documented(table)
    for name in table.model_fields:
        text = docs.get(name, "").replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", help=text, metavar="VALUE")


def documented(table: type[Options]) -> dict[str, str]:
    """What stands below the fields of a table in its source."""
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
    """The table with what the flags say.

    Raises:
        ConfigError: a value is wrong; the message names its flag.
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
    """Whether a tuple fits a type."""
    return get_origin(annotation) is tuple or any(map(takes_several, get_args(annotation)))


def plain(text: str) -> Any:
    """A value as it is written in JSON, a list of them with commas between, or a text."""
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
    """A mapping that is written in JSON; empty where there is none.

    Raises:
        ConfigError: it is none.
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
