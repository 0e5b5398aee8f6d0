"""From what the user wrote to a checked `Run`: sections, derived values, actions, contradictions.

All problems of an input are found in one pass and raised together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pydantic
from ed_infra.errors import did_you_mean, unknown_name
from ed_infra.options import Options

from ed_elarge import action_options, checks
from ed_elarge.action_options import Action
from ed_elarge.errors import InputError, KeyPath, Problem
from ed_elarge.nodes import Document
from ed_elarge.sections import (
    LATER,
    SECTIONS,
    BaseConfigSection,
    EvalSection,
    LoaderSection,
    ModelSection,
    PlatformSection,
    ShardingSection,
)
from ed_elarge.validation import validate

#: Keys that may hold the whole configuration, beside `actions`.
WRAPPERS = ("config", "elarge_model", "elm")
_SECTION_NAMES = (*SECTIONS, "trainer")


@dataclass(frozen=True)
class Origin:
    """Where a configuration came from, so that a later error can point at its line.

    Attributes:
        document: the text, if it was a file, else a nameless document.
        prefix: path of the mapping that holds the sections.
    """

    document: Document
    prefix: KeyPath = ()

    def error(self, problems: list[Problem]) -> InputError:
        """The error for problems whose paths start at the top of the file."""
        return InputError(
            self.document.name, problems, self.document if self.document.text else None
        )

    def blame(self, path: KeyPath, message: str, *, on_key: bool = False) -> InputError:
        """The error for one problem whose path starts at the sections."""
        return self.error([Problem((*self.prefix, *path), message, on_key)])


@dataclass(frozen=True)
class Run:
    """A checked configuration. Sections that the user left out have their defaults; `model`,
    `mixture` and `trainer` have none and are None instead."""

    origin: Origin
    model: ModelSection | None
    loader: LoaderSection
    sharding: ShardingSection
    platform: PlatformSection
    base_config: BaseConfigSection
    mixture: Any
    trainer: Any
    esurge: Any
    eval: EvalSection
    actions: tuple[Action, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The canonical configuration as JSON values, defaults and derived values included.

        Left out is what is absent by default (null).
        """
        sections = {name: getattr(self, name) for name in _ORDER}
        out = {name: _dump(value) for name, value in sections.items() if value is not None}
        if self.actions:
            out["actions"] = [_dump_action(action) for action in self.actions]
        return out


_ORDER = ("model", "loader", "sharding", "platform", "base_config", "mixture", "trainer", "esurge")
_ORDER += ("eval",)


def _dump(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        fields = type(value).model_fields
        items = ((name, getattr(value, name)) for name in fields)
        return {k: _dump(v) for k, v in items if v is not None or fields[k].default is not None}
    if isinstance(value, Mapping):
        return {key: _dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump_item(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if callable(value):  # read back by name
        return f"{value.__module__}:{value.__qualname__}"
    return value


def _dump_item(value: Any) -> Any:
    """An entry of a list: only what was given, since some keys go with some kinds alone."""
    if isinstance(value, pydantic.BaseModel):
        fields = type(value).model_fields
        return {k: _dump(getattr(value, k)) for k in fields if k in value.model_fields_set}
    return _dump(value)


def _dump_action(action: Action) -> Any:
    given = {name: getattr(action.options, name) for name in action.options.model_fields_set}
    return {action.name: _dump(given)} if given else action.name


def normalize(document: Document, *, require_actions: bool = False) -> Run:
    """Check a document.

    Args:
        document: a parsed file, or a document that only holds a value.
        require_actions: a run file must say what to do; a configuration for Python need not.

    Raises:
        InputError: everything that is wrong, with places.
    """
    problems: list[Problem] = []
    sections, prefix, raw_actions = _unwrap(document, problems)
    origin = Origin(document, prefix)
    built: dict[str, Any] = {}
    for name, value in _with_batch_size(sections).items():
        if name in _SECTION_NAMES:
            built[name], found = section(name, value, (*prefix, name))
            problems.extend(found)
        else:
            problems.append(Problem((*prefix, name), unknown_section(name), on_key=True))
    actions = _actions(*raw_actions, require_actions, prefix, problems)
    for name in SECTIONS:
        if name not in built:
            built[name] = None if name in ("model", "mixture") else SECTIONS[name]()()
    built.setdefault("trainer", None)

    run = Run(origin, **built, actions=tuple(actions))
    checker = checks.Checker(run, sections)
    problems.extend(checker.problems)
    if problems:
        raise origin.error(problems)
    return checker.resolved()


def _unwrap(
    document: Document, problems: list[Problem]
) -> tuple[dict[str, Any], KeyPath, tuple[Any, KeyPath]]:
    """Find the mapping of sections and the actions; see `WRAPPERS`."""
    top = document.value
    if top is None:
        raise InputError(document.name, [Problem((), "is empty: nothing is configured")])
    if not isinstance(top, Mapping):
        message = f"must be a mapping of sections, got {type(top).__name__}"
        raise InputError(document.name, [Problem((), message)], document if document.text else None)
    wrapped = [name for name in WRAPPERS if name in top]
    if not wrapped:
        sections = {k: v for k, v in top.items() if k != "actions"}
        return sections, (), (top.get("actions"), ("actions",))
    wrapper, prefix = wrapped[0], (wrapped[0],)
    for name in top:
        if name not in (wrapper, "actions"):
            message = (
                f"stands beside {wrapper!r}, which holds the whole configuration: move it inside"
            )
            problems.append(Problem((name,), message, on_key=True))
    inside = top[wrapper] if top[wrapper] is not None else {}
    if not isinstance(inside, Mapping):
        problems.append(Problem(prefix, "must be a mapping of sections"))
        inside = {}
    sections = {k: v for k, v in inside.items() if k != "actions"}
    if "actions" in inside and "actions" in top:
        message = f"actions are given here and inside {wrapper!r}: keep one"
        problems.append(Problem(("actions",), message, on_key=True))
    if "actions" in inside:
        return sections, prefix, (inside["actions"], (*prefix, "actions"))
    return sections, prefix, (top.get("actions"), ("actions",))


def _with_batch_size(sections: dict[str, Any]) -> dict[str, Any]:
    """`mixture.batch_size` is the default of `trainer.total_batch_size`: before any check of it."""
    trainer, mixture = sections.get("trainer"), sections.get("mixture")
    if not isinstance(trainer, Mapping) or not isinstance(mixture, Mapping):
        return sections
    batch_size = mixture.get("batch_size")
    if "total_batch_size" in trainer or not isinstance(batch_size, int):
        return sections
    return {**sections, "trainer": {**trainer, "total_batch_size": batch_size}}


def unknown_section(name: object) -> str:
    """The message for a section that does not exist."""
    if name in LATER:
        return f"the section {name!r} is not part of this version of ed-elarge"
    known = [*_SECTION_NAMES, "actions"]
    return f"unknown section {name!r}{did_you_mean(str(name), known)} (known: {', '.join(known)})"


def section(
    name: str, value: Any, path: KeyPath, *, partial: bool = False
) -> tuple[Any | None, list[Problem]]:
    """Check one section: `(instance, [])`, or `(None, problems)`. See `validation.validate`."""
    if name != "trainer":
        return validate(SECTIONS[name](), value, path, partial=partial)
    from ed_trainers.arguments import ARGUMENTS

    kind = value.get("trainer_type", "sft") if isinstance(value, Mapping) else "sft"
    if kind not in ARGUMENTS:
        problem = Problem((*path, "trainer_type"), str(unknown_name("trainer", kind, ARGUMENTS)))
        return None, [problem]
    return validate(ARGUMENTS[kind], value, path, partial=partial)


def _actions(
    value: Any, path: KeyPath, required: bool, prefix: KeyPath, problems: list[Problem]
) -> list[Action]:
    if value is None:
        if required:
            known = ", ".join(action_options.ACTIONS)
            message = f"no actions are given: say what to do, such as [validate, train] ({known})"
            problems.append(Problem(path if path in prefix else (), message, on_key=True))
        return []
    raw, found = action_options.split(value, path)
    problems.extend(found)
    actions = []
    for item in raw:
        name = action_options.canonical(item.name)
        if name is None:
            problems.append(Problem(item.path, action_options.unknown(item.name), on_key=True))
            continue
        spec = action_options.ACTIONS[name]
        parameters, scalar = item.parameters, spec.scalar
        if scalar and parameters is not None and not isinstance(parameters, Mapping):
            parameters = {scalar: parameters}
        options: Options | None
        options, found = validate(spec.options, parameters, item.parameter_path)
        problems.extend(found)
        if options is not None:
            actions.append(Action(name, options, item.path))
    return actions
