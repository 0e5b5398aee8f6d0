"""Flags of a command from records of options. Each field is a flag, validated by its class."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
import yaml
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.options import Options
from pydantic import ValidationError
from typer.core import TyperOption

from ed_esurge.command.foreign_flags import NOTES, parse_mapping, translate_entries

OptionsT = TypeVar("OptionsT", bound=Options)

#: Kind of a value that is a JSON object.
JSON = "<json>"
#: End of the kind of a flag that accepts several words: `--also <str>...`.
SEVERAL = "..."
#: A name of a field in a message: with an underscore, or in backticks.
_FIELD = re.compile(r"`\w+`|\w+_\w+")


@dataclass(frozen=True)
class Flags:
    """How the fields of a record are flags: `engine: Annotated[EngineConfig, Flags("engine")]`.

    `max_model_len` is `--max-model-len <int>`. A field that is true or false is a flag without a
    value: `--silent-mode`, `--no-silent-mode`. Aliases of fields are also flags.

    Attributes:
        title: heading of the group in the help.
        short: field -> short names of its flag, which are vLLM's.
        omitted: field without a flag -> what to use instead; the flag is refused with this text.
        skipped: fields that are no flags.
        hidden: fields whose flags are not in the help.
        has_words: whether a field with several values accepts separate words (`--also A B`), and
            messages name flags. False: values are JSON, or have commas (`--extra-stops a,b`), and
            messages are those of run files.
        defaults: returns the values of fields that are not set, from the values of all flags.
    """

    title: str
    short: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    omitted: Mapping[str, str] = field(default_factory=dict)
    skipped: Collection[str] = ()
    hidden: Collection[str] = ()
    has_words: bool = True
    defaults: Callable[[Mapping[str, Any]], Mapping[str, object]] = lambda values: {}

    def list_parameters(self, table: type[Options]) -> list[inspect.Parameter]:
        """Return the flags of the fields of a class, as parameters of a function for typer."""
        docs = read_attribute_docs(table)
        parameters = []
        for name, info in table.model_fields.items():
            if name in self.skipped:
                continue
            aliases = [alias for alias, target in table.ALIASES.items() if target == name]
            names = [*self.short.get(name, ()), *map(format_flag, (name, *aliases))]
            settings: dict[str, Any] = {"help": docs[name], "rich_help_panel": self.title}
            settings["hidden"] = name in self.hidden or name in self.omitted
            kind = describe_kind(info.annotation, self.has_words)
            annotation: object = str | None
            if name in self.omitted:
                settings["callback"] = _refuse(self.omitted[name])
            elif info.annotation in (bool, bool | None):
                names = [f"{flag}/--no-{flag[2:]}" for flag in names]
                annotation = bool | None
            else:
                settings["metavar"] = kind
                if kind.endswith(SEVERAL):
                    annotation = list[str] | None
                elif "|" in kind:
                    settings["autocompletion"] = _list_choices(kind)
            default = info.get_default(call_default_factory=True)
            is_shown = default not in (None, (), {}) or "None:" in docs[name]
            if is_shown and kind != JSON and "default:" not in docs[name].lower():
                settings["help"] += f"  [default: {format_default(default)}]"
            option = typer.Option(None, *names, show_default=False, **settings)
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(name, keyword, default=option, annotation=annotation)
            )
        return parameters

    def build_record(self, table: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
        """Return the record with the values of the flags.

        Raises:
            ConfigError: a value is invalid; the message names its flag.
        """
        fields = {
            name: self._parse(name, info.annotation, values[name])
            for name, info in table.model_fields.items()
            if values.get(name) is not None and name not in {*self.omitted, *self.skipped}
        }
        try:
            return table.model_validate({**self.defaults(values), **fields})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            if first["loc"]:
                message = f"{format_flag(str(first['loc'][0]))}: {message}"
            elif self.has_words:
                message = _FIELD.sub(lambda match: self._name_flag(table, match[0]), message)
            raise ConfigError(message) from None

    def _parse(self, name: str, annotation: object, value: object) -> object:
        if not isinstance(value, str):
            return value
        if describe_kind(annotation, self.has_words) == JSON:
            return parse_mapping(value, format_flag(name)) if value != "null" else None
        if self.has_words:
            return value
        parsed_value = parse_value(value)
        is_single = parsed_value is not None and not isinstance(parsed_value, list)
        return [parsed_value] if is_single and takes_several(annotation) else parsed_value

    def _name_flag(self, table: type[Options], word: str) -> str:
        name = word.strip("`")
        return format_flag(name) if name in table.model_fields.keys() - self.omitted else word


def _refuse(instead: str) -> Callable[[str | None], None]:
    def refuse(value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"the command has no such flag: {instead}")

    return refuse


def _list_choices(kind: str) -> Callable[[], list[str]]:
    return lambda: kind.strip("<>").split("|")


def _use_config(ctx: typer.Context, path: str | None) -> None:
    if path is not None and not ctx.resilient_parsing:
        notes = ctx.meta.setdefault(NOTES, [])
        try:
            ctx.default_map = read_flag_file(path, ctx.command.params, notes)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None


_ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A YAML file of flags; the command line has precedence.",
        is_eager=True,
        callback=_use_config,
    ),
]


def expand_records(
    function: Callable[..., Any],
) -> tuple[Callable[[dict[str, Any]], Any], inspect.Signature]:
    """Return a function of the values of all flags, and the parameters that are these flags.

    A command with records also has the flag `--config`.
    """
    signature = inspect.signature(function, eval_str=True)
    records: dict[str, tuple[type[Options], Flags]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        parts = get_args(parameter.annotation)
        if parts and isinstance(parts[-1], Flags):
            records[name] = parts[0], parts[1]
            for one in parts[1].list_parameters(parts[0]):
                parameters.setdefault(one.name, one)
        else:
            parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    if records:
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters["config"] = inspect.Parameter(
            "config", keyword, default=None, annotation=_ConfigFile
        )

    def call(values: dict[str, Any]) -> Any:
        built = {
            name: flags.build_record(table, values) for name, (table, flags) in records.items()
        }
        others = {name: values[name] for name in signature.parameters.keys() - records.keys()}
        return function(**others, **built)

    return call, inspect.Signature([*parameters.values()])


def format_flag(name: str) -> str:
    """Return the flag of a field: `--max-model-len` for `max_model_len`."""
    return f"--{name.replace('_', '-')}"


def describe_kind(annotation: object, has_words: bool = True) -> str:
    """Return the kind of value that a flag accepts, such as `<int>` or `<fcfs|priority>`.

    Args:
        has_words: whether several values are separate words (`<str>...`); otherwise they have
            commas (`<str>,<str>`).
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"<{'|'.join(map(str, parts))}>"
    if origin is tuple:
        kind = describe_kind(parts[0])
        return f"{kind}{SEVERAL}" if has_words else f"{kind},{kind}"
    if origin is Mapping:
        return JSON if parts[1] is object else f"NAME=PATH{SEVERAL}"
    if origin is Annotated:
        return describe_kind(parts[0], has_words)
    if parts:
        kinds = (describe_kind(part, has_words) for part in parts if part is not type(None))
        return next(kinds)
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return JSON
    return "<int>" if annotation is int else "<float>" if annotation is float else "<str>"


def format_default(default: object) -> str:
    """Return a default as the text that a flag accepts."""
    return "none" if default is None else json.dumps(default, default=str).strip('"')


def read_flag_file(path: str, parameters: Iterable[object], notes: list[str]) -> dict[str, object]:
    """Return the values of a YAML file of flags, as defaults of the parameters of a command.

    Args:
        path: the file.
        parameters: the parameters of the command.
        notes: receives the flags of other servers without an effect, each with its reason.

    Raises:
        ConfigError: the file cannot be read, or has a key that is no flag.
    """
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must contain flags and their values, such as port: 80")
    options = {
        flag[2:]: option
        for option in parameters
        if isinstance(option, TyperOption)
        for flag in option.opts
        if flag.startswith("--")
    }
    defaults: dict[str, object] = {}
    try:
        entries, unused_flags = translate_entries(values)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    notes.extend(unused_flags)
    for key, value in entries.items():
        name = str(key).replace("_", "-")
        if name in ("config", "help") or name not in options:
            hint = did_you_mean(name, options)
            raise ConfigError(f"--config {path}: {key!r} is no flag of this command{hint}")
        option = options[name]
        if option.is_flag:
            if not isinstance(value, bool):
                raise ConfigError(f"--config {path}: {key} must be true or false, got {value!r}")
            default: object = value
        elif option.multiple:
            default = [*map(_format_value, value if isinstance(value, list) else [value])]
        else:
            default = _format_value(value)
        defaults[str(option.name)] = default
    return defaults


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_attribute_docs(table: type[Options]) -> dict[str, str]:
    """Return the descriptions and attribute docstrings of a class."""
    docs = {name: info.description or "" for name, info in table.model_fields.items()}
    for owner in reversed(table.__mro__):
        if owner is Options or not issubclass(owner, Options):
            continue
        body = _parse_classes(owner.__module__)[owner.__name__].body
        for statement, following in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                value = following.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs[ast.unparse(statement.target)] = " ".join(value.value.split())
    return docs


@cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {one.name: one for one in body if isinstance(one, ast.ClassDef)}


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
