"""Command line flags from option classes. Each field is a flag, validated by its class."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.options import Options
from pydantic import ValidationError

from ed_esurge.server.options import ServerOptions

OptionsT = TypeVar("OptionsT", bound=Options)

#: Field of `ServerOptions` -> short names of its flag, which are vLLM's.
SHORT_FLAGS = {"data_parallel_size": ("-dp",)}
#: A name of a field in a message: with an underscore, or in backticks.
_FIELD = re.compile(r"`\w+`|\w+_\w+")


def add_options(parser: argparse.ArgumentParser, table: type[Options], title: str) -> None:
    """Add a flag for each field of a class: `max_model_len` becomes `--max-model-len INT`.

    A field that is true or false is a flag without a value: `--silent-mode`, `--no-silent-mode`.
    """
    group = parser.add_argument_group(title)
    docs = read_attribute_docs(table)
    for name, field in table.model_fields.items():
        flag, default = format_flag(name), field.get_default(call_default_factory=True)
        text = f"{docs.get(name, '')} (default: {format_default(default)})".replace("%", "%%")
        if field.annotation is bool:
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(flag, help=text, action=action, default=None)
        else:
            group.add_argument(flag, help=text, metavar=metavar(field.annotation))


def add_server_options(parser: argparse.ArgumentParser, omitted: Collection[str]) -> None:
    """Add a flag for each field of `ServerOptions`, with the type of the field and its aliases.

    A field with several values accepts them as separate words: `--also MODEL MODEL`.

    Args:
        omitted: fields without a flag.
    """
    group = parser.add_argument_group("server")
    docs = read_attribute_docs(ServerOptions)
    for name, field in ServerOptions.model_fields.items():
        if name in omitted:
            continue
        aliases = [alias for alias, target in ServerOptions.ALIASES.items() if target == name]
        flags = [*SHORT_FLAGS.get(name, ()), *map(format_flag, (name, *aliases))]
        default = field.get_default(call_default_factory=True)
        kind = metavar(field.annotation)
        settings: dict[str, Any] = {"default": default}
        if field.annotation in (bool, bool | None):
            settings["action"] = argparse.BooleanOptionalAction
        elif kind.startswith("{"):
            settings["choices"] = kind.strip("{}").split(",")
        else:
            settings["metavar"] = kind.removesuffix(",...")
            settings["type"] = {"INT": int, "FLOAT": float}.get(kind, str)
        if kind == "JSON":
            settings["default"] = None
        if kind.endswith(",..."):
            settings |= {"nargs": "+", "default": None if default is None else list(default)}
        shown = "none" if settings["default"] in (None, []) else settings["default"]
        text = f"{docs[name]} (default: {shown})".replace("%", "%%")
        group.add_argument(*flags, dest=name, help=text, **settings)


def format_flag(name: str) -> str:
    """Return the flag of a field: `--max-model-len` for `max_model_len`."""
    return f"--{name.replace('_', '-')}"


def build_server_options(
    values: argparse.Namespace, omitted: Collection[str], **further: object
) -> ServerOptions:
    """Return the options with the values of the flags.

    Args:
        omitted: fields without a flag.
        further: values of fields without a flag.

    Raises:
        ConfigError: a value is invalid; the message names its flag.
    """
    names = [name for name in ServerOptions.model_fields if name not in omitted]
    fields = {name: getattr(values, name) for name in names}
    fields["limits"] = parse_mapping(fields["limits"], "--limits")
    explicit = {name: value for name, value in (fields | further).items() if value is not None}
    try:
        return ServerOptions.model_validate(explicit)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            message = f"{format_flag(str(first['loc'][0]))}: {message}"
        else:
            message = _FIELD.sub(lambda match: _name_flag(match[0], names), message)
        raise ConfigError(message) from None


def _name_flag(word: str, names: Collection[str]) -> str:
    name = word.strip("`")
    return format_flag(name) if name in names else word


def metavar(annotation: object) -> str:
    """Return the kind of value that a flag accepts, such as `INT` or `{fcfs,priority}`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin is tuple:
        return f"{metavar(parts[0])},..."
    if origin is Mapping:
        return "NAME=PATH,..."
    if origin is Annotated:
        return metavar(parts[0])
    if parts:
        return next(metavar(part) for part in parts if part is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return "JSON"
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(annotation, "null")  # type: ignore[arg-type]


def format_default(default: object) -> str:
    """Return a default as the text that a flag accepts."""
    return "none" if default is None else json.dumps(default, default=str)


def read_config(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags of a YAML file: `max-model-len: 4096` is `--max-model-len 4096`.

    Raises:
        ConfigError: the file cannot be read, or has a key that is no flag.
    """
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must contain flags and their values, such as port: 80")
    actions = parser._option_string_actions
    flag_actions = {flag[2:]: action for flag, action in actions.items() if flag.startswith("--")}
    flags: list[str] = []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name in ("config", "help") or name not in flag_actions:
            hint = did_you_mean(name, flag_actions)
            raise ConfigError(f"--config {path}: {key!r} is no flag of this command{hint}")
        if flag_actions[name].nargs == 0 or isinstance(
            flag_actions[name], argparse.BooleanOptionalAction
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"--config {path}: {key} must be true or false, got {value!r}")
            if f"--no-{name}" in actions or value:
                flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list) and flag_actions[name].nargs is not None:
            flags += [f"--{name}", *map(str, value)]
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flags.append(f"--{name}={text}")
    return flags


def read_attribute_docs(table: type[Options]) -> dict[str, str]:
    """Return the attribute docstrings of a class."""
    docs: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if owner is Options or not issubclass(owner, Options):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
                value = following.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[ast.unparse(field.target)] = " ".join(value.value.split())
    return docs


def build_options(values: argparse.Namespace, table: type[OptionsT]) -> OptionsT:
    """Return the options with the values of the flags.

    Raises:
        ConfigError: a value is invalid; the message names its flag.
    """
    flag_values = {name: getattr(values, name) for name in table.model_fields}
    fields = {
        name: parse_value(text) if isinstance(text, str) else text
        for name, text in flag_values.items()
        if text is not None
    }
    for name, value in fields.items():
        one = value is not None and not isinstance(value, list)
        if one and takes_several(table.model_fields[name].annotation):
            fields[name] = [value]
    try:
        return table(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        flag = f"{format_flag(str(first['loc'][0]))}: " if first["loc"] else ""
        raise ConfigError(f"{flag}{first['msg']}") from None


def takes_several(annotation: object) -> bool:
    """Return whether a type accepts a tuple."""
    return get_origin(annotation) is tuple or any(map(takes_several, get_args(annotation)))


def parse_value(text: str) -> Any:
    """Return the value of a flag: JSON, a comma-separated list of JSON values, or a string."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text in ("True", "False"):
        return text == "True"
    if "," in text:
        return [parse_value(part.strip()) for part in text.split(",") if part.strip()]
    return text


def parse_mapping(text: str | None, flag: str) -> Mapping[str, Any]:
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
