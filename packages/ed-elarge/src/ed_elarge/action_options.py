"""The actions of a run file: their names, other spellings and parameters. Imports nothing heavy.

What they do is in `ed_elarge.actions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from ed_infra.errors import did_you_mean
from ed_infra.options import Options, choice
from pydantic import Field, model_validator

from ed_elarge.errors import KeyPath, Problem
from ed_elarge.sections import EvalSection, NotNegative, Positive


class NoOptions(Options):
    """Actions that take none."""


class SaveOptions(Options):
    """`to_json`, `to_yaml`."""

    path: str


class EvalOptions(EvalSection):
    """`eval`: what it gives here goes before the `eval` section."""

    engine: Annotated[str, choice("engine", ("auto", "esurge"))] = "auto"
    """eSurge is the only engine there is; `auto` takes it."""

    def over(self, section: EvalSection) -> EvalSection:
        """The section with what this action gives on top."""
        given = {k: getattr(self, k) for k in self.model_fields_set - {"engine"}}
        return section.replace(**given)


class GenerateOptions(Options):
    """`generate`: print completions."""

    ALIASES: ClassVar[Mapping[str, str]] = {"prompt": "prompts", "max_tokens": "max_new_tokens"}

    prompts: tuple[str, ...] | str | None = None
    """None: the beginning of a held-out text, or else an empty prompt."""
    max_new_tokens: Positive = 64
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    seed: NotNegative = 0


class ServeOptions(Options):
    """`serve`: the OpenAI-compatible server, until it is interrupted."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 11556
    """0 takes a free one."""
    log_level: Annotated[
        str, choice("log level", ("critical", "error", "warning", "info", "debug", "trace"))
    ] = "info"
    served_model_name: str | None = None
    """What clients call the model; None: the last part of its path."""
    require_api_key: bool = False
    """Refuse to start without `api_key`."""
    api_key: str | None = None
    """The key that each request must bring; None: anybody may ask."""
    cors_origins: tuple[str, ...] | None = None
    """Web origins whose pages may call the server; `["*"]` is all."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ServeOptions:
        if self.require_api_key and not self.api_key:
            raise ValueError("require_api_key needs api_key: the key that clients must bring")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        return self


class Spec(NamedTuple):
    """One row of the table of actions.

    Attributes:
        options: class of its parameters.
        scalar: the parameter that `name: VALUE` sets, where that makes sense.
        doc: one line for messages.
    """

    options: type[Options]
    scalar: str | None
    doc: str


ACTIONS: dict[str, Spec] = {
    "validate": Spec(NoOptions, None, "check the configuration"),
    "print": Spec(NoOptions, None, "print a summary of the configuration"),
    "dump_config": Spec(NoOptions, None, "print the whole configuration, defaults included"),
    "to_json": Spec(SaveOptions, "path", "save the whole configuration as JSON"),
    "to_yaml": Spec(SaveOptions, "path", "save the whole configuration as YAML"),
    "train": Spec(NoOptions, None, "train the model"),
    "eval": Spec(EvalOptions, None, "evaluate with lm-evaluation-harness"),
    "generate": Spec(GenerateOptions, "prompts", "print completions"),
    "serve": Spec(ServeOptions, None, "serve an OpenAI-compatible API"),
}

#: Other spelling -> action.
ALIASES: dict[str, str] = {
    "show": "print",
    "print_config": "dump_config",
    "config": "dump_config",
    "save_json": "to_json",
    "write_json": "to_json",
    "save_yaml": "to_yaml",
    "write_yaml": "to_yaml",
    "server": "serve",
}


@dataclass(frozen=True)
class Action:
    """One thing to do, checked.

    Attributes:
        name: a key of `ACTIONS`.
        options: its parameters.
        path: where it stands in the file.
    """

    name: str
    options: Any
    path: KeyPath = ()


class RawAction(NamedTuple):
    """An action as the file has it: name and parameters, and where each of them stands."""

    name: str
    parameters: Any
    path: KeyPath
    parameter_path: KeyPath


def canonical(name: object) -> str | None:
    """The action that a spelling names (`Save-JSON` -> `to_json`), or None."""
    spelling = str(name).lower().replace("-", "_")
    spelling = ALIASES.get(spelling, spelling)
    return spelling if spelling in ACTIONS else None


def split(value: Any, path: KeyPath) -> tuple[list[RawAction], list[Problem]]:
    """Take an `actions` value apart: one name, a list of names and mappings, or one mapping."""
    found: list[RawAction] = []
    problems: list[Problem] = []
    if isinstance(value, dict):
        items = [({name: parameters}, path) for name, parameters in value.items()]
    elif isinstance(value, list):
        items = [(item, (*path, i)) for i, item in enumerate(value)]
    else:
        items = [(value, path)]
    for item, here in items:
        if isinstance(item, str):
            found.append(RawAction(item, None, here, here))
        elif not isinstance(item, dict) or not item:
            message = f"an action is a name or a mapping of a name to parameters, got {item!r}"
            problems.append(Problem(here, message))
        elif len(item) == 1:
            name, parameters = next(iter(item.items()))
            found.append(RawAction(str(name), parameters, (*here, name), (*here, name)))
        else:
            _several_keys(item, here, found, problems)
    if not items:
        problems.append(Problem(path, f"no action is given (known: {', '.join(ACTIONS)})"))
    return found, problems


def _several_keys(
    item: dict[Any, Any], here: KeyPath, found: list[RawAction], problems: list[Problem]
) -> None:
    """`- serve:` with its parameters indented too little reads as one mapping of many keys."""
    name, first = next(iter(item.items()))
    others = {key: value for key, value in item.items() if key != name}
    if canonical(name) and first is None and not any(canonical(key) for key in others):
        found.append(RawAction(str(name), others, (*here, name), here))
        return
    message = (
        f"one list item holds several keys ({', '.join(map(str, item))}): start each action "
        "with its own dash, and indent its parameters below its name"
    )
    problems.append(Problem((*here, next(iter(others))), message, on_key=True))


def unknown(name: str) -> str:
    """The message for an action that does not exist."""
    hint = did_you_mean(name, [*ACTIONS, *ALIASES])
    return f"unknown action {name!r}{hint} (known: {', '.join(ACTIONS)})"
