"""`normalize` converts a document to a `RunConfig`: sections, actions, shared values, warnings.

All problems of an input are reported together. `ed_elarge.config.table` lists sections and actions.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ed_elarge.config import other_programs
from ed_elarge.config.checks import advice, unused
from ed_elarge.config.run_config import Action, RunConfig
from ed_elarge.config.table import (
    ACTIONS,
    SECTIONS,
    Section,
    canonical_action,
    unknown_action,
    unknown_section,
)
from ed_elarge.config.validation import empty_texts, validate_values
from ed_elarge.errors import Document, InputError, Problem, ValuePath

#: Keys that may contain the whole configuration except `actions`.
WRAPPERS = ("config", "elarge_model", "elm")


def normalize(document: Document, *, require_actions: bool = False) -> RunConfig:
    """Validate a document.

    Args:
        document: A parsed file, or a document with a value.
        require_actions: Whether a document without actions is invalid, as for a run file.

    Raises:
        InputError: All problems with their locations.
    """
    problems: list[Problem] = []
    sections, prefix, raw_actions = _unwrap(document, problems)
    built: dict[str, Any] = {}
    translated = _translate(document, sections, prefix)
    document, sections = translated.document, translated.sections
    problems.extend(translated.problems)
    filled = _fill_batch_size(sections)
    misspelled = set[str]()
    for name, value in sections.items():
        if name not in SECTIONS:
            problems.append(Problem((*prefix, name), unknown_section(name), on_key=True))
            close_matches = difflib.get_close_matches(str(name).lower(), SECTIONS, n=1)
            misspelled.update(
                section_name for section_name in close_matches if section_name not in sections
            )
        elif value is None and not SECTIONS[name].has_default:
            message = "is empty: write its keys, or omit the section"
            problems.append(Problem((*prefix, name), message))
    for name, section in SECTIONS.items():
        built[name] = None
        if filled.get(name) is not None or (section.has_default and name not in misspelled):
            built[name], new_problems = _validate(section, filled.get(name), (*prefix, name))
            problems.extend(new_problems)
            if not new_problems:
                problems.extend(empty_texts(filled.get(name), (*prefix, name)))
    served = _served(translated.parameters, (*prefix, other_programs.SERVE), problems)
    actions = _actions(*raw_actions, require_actions and not problems, problems, served)
    written_sections = {**sections, **dict.fromkeys(misspelled)}
    run = RunConfig(document, prefix, written_sections, built, actions)
    problems.extend(_across(run))
    if problems:
        raise run.error(problems)
    shared_sections = _share_trainer_options(run)
    run.warnings = tuple(_warnings(run))
    run.note = translated.note
    run.set_sections(shared_sections)
    return run


def check_sections(sections: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of sections. Missing keys are no problem: a later call may set them."""
    translated = _translate(Document(""), sections, ())
    problems = list(translated.problems)
    for name, value in translated.sections.items():
        if name not in SECTIONS:
            problems.append(Problem((name,), unknown_section(name), on_key=True))
        else:
            problems.extend(_validate(SECTIONS[name], value, (name,), partial=True)[1])
    return problems


def _translate(
    document: Document, sections: Mapping[str, Any], prefix: ValuePath
) -> other_programs.Translated:
    """Translate the keys of EasyDeL, if the document has any."""
    if other_programs.has_other_keys(sections):
        return other_programs.translate_document(document, sections, prefix)
    return other_programs.Translated(document, sections, {}, [], "")


def _validate(
    section: Section, value: object, path: ValuePath, *, partial: bool = False
) -> tuple[Any | None, list[Problem]]:
    """Check a section: `(instance, [])`, or `(None, problems)`."""
    kind = section.choose_kind(value, path)
    if isinstance(kind, Problem):
        return None, [kind]
    classes = section.classes()
    if section.chosen_by and isinstance(value, Mapping):
        ignored_keys = {
            *unused.find_other_kinds(value, kind, classes),
            *unused.replaced_names(value, classes[kind]),
        }
        value = {key: item for key, item in value.items() if key not in ignored_keys}
        value |= {section.chosen_by: kind} if section.chosen_by in value else {}
    return validate_values(classes[kind], value, path, partial=partial)


def _across(run: RunConfig) -> list[Problem]:
    """Return problems between keys, sections and actions."""
    problems = [*map(run.place, _batch_sizes(run))]
    for section in SECTIONS.values():
        for check in section.checks:
            problems.extend(run.place(problem) for problem in check(run))
    for action in run.actions:
        for check in ACTIONS[action.name].checks:
            problems.extend(run.place_in(action, problem) for problem in check(run, action))
    return problems + _needs(run)


def _needs(run: RunConfig) -> list[Problem]:
    """Return a problem for each missing section that an action needs."""
    problems: dict[str, Problem] = {}
    for action in run.actions:
        for name in ACTIONS[action.name].needs:
            if name not in run.written:
                message = f"the action {action.name!r} needs the section {name!r}"
                problems.setdefault(name, Problem(action.path, message, on_key=True))
    return list(problems.values())


def _warnings(run: RunConfig) -> list[Problem]:
    """Return warnings about keys without effect."""
    problems = (
        *unused.without_effect(run),
        *unused.find_other_method_keys(run),
        *unused.find_unused_models(run),
        *advice.list_advice(run),
    )
    out = [run.place(problem) for problem in problems]
    for name, section in SECTIONS.items():
        if (options := run.sections[name]) is not None:
            for problem in unused.list_unused_options(options, section.unused, run):
                out.append(run.place(problem._replace(path=(name, *problem.path))))
    for action in run.actions:
        for problem in unused.list_unused_options(action.options, ACTIONS[action.name].unused, run):
            out.append(run.place_in(action, problem))
    return out


# Values that trainer and mixture share.
#
# The sequences of an optimizer step may be written as `trainer.total_batch_size` or as
# `mixture.batch_size`. The seed of the mixture falls back to the trainer's.


def _fill_batch_size(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy the mixture's batch size to the trainer, before the trainer's default is checked."""
    trainer, mixture = sections.get("trainer"), sections.get("mixture")
    if not isinstance(trainer, Mapping) or not isinstance(mixture, Mapping):
        return sections
    size = mixture.get("batch_size")
    if "total_batch_size" in trainer or type(size) is not int or size < 1:
        return sections
    return {**sections, "trainer": {**trainer, "total_batch_size": size}}


def _batch_sizes(run: RunConfig) -> list[Problem]:
    trainer, mixture = run.trainer, run.mixture
    if trainer is None or mixture is None or mixture.batch_size in (None, trainer.total_batch_size):
        return []
    message = (
        f"{trainer.total_batch_size} differs from mixture.batch_size ({mixture.batch_size}): both "
        "specify the sequences of one optimizer step; keep one of them"
    )
    return [Problem(("trainer", "total_batch_size"), message)]


def _share_trainer_options(run: RunConfig) -> dict[str, Any]:
    """Return the mixture with the batch size and the seed of the trainer."""
    trainer, mixture = run.trainer, run.mixture
    if trainer is None or mixture is None:
        return {}
    seed = mixture.seed if mixture.seed is not None else trainer.seed
    return {"mixture": mixture.replace(batch_size=trainer.total_batch_size, seed=seed)}


# The document.


def _unwrap(
    document: Document, problems: list[Problem]
) -> tuple[dict[str, Any], ValuePath, tuple[Any, ValuePath]]:
    """Find the mapping of sections and the actions; see `WRAPPERS`."""
    top = document.value
    if top is None:
        raise InputError(document, [Problem((), "is empty: nothing is configured")])
    if not isinstance(top, Mapping):
        message = f"must be a mapping of sections, got {type(top).__name__}"
        raise InputError(document, [Problem((), message)])
    wrapper = next((name for name in WRAPPERS if name in top), None)
    inside, prefix = (top, ()) if wrapper is None else (top[wrapper], (wrapper,))
    for name in top if wrapper is not None else ():
        if name not in (wrapper, "actions"):
            message = (
                f"is next to {wrapper!r}, which contains the whole configuration: move it inside"
            )
            problems.append(Problem((name,), message, on_key=True))
    if inside is None:
        inside = {}
    if not isinstance(inside, Mapping):
        problems.append(Problem(prefix, f"must be a mapping of sections, got {inside!r}"))
        inside = {}
    if wrapper is not None and "actions" in inside and "actions" in top:
        message = f"actions are given here and inside {wrapper!r}: keep one"
        problems.append(Problem(("actions",), message, on_key=True))
    sections = {key: value for key, value in inside.items() if key != "actions"}
    if "actions" in inside:
        return sections, prefix, (inside["actions"], (*prefix, "actions"))
    return sections, prefix, (top.get("actions"), ("actions",))


# Actions.


class _RawAction(NamedTuple):
    """An action before validation: name and parameters with their paths."""

    name: str
    parameters: object
    path: ValuePath
    parameter_path: ValuePath


def _served(
    parameters: Mapping[str, object], path: ValuePath, problems: list[Problem]
) -> Mapping[str, object]:
    """Check parameters of the actions `serve` that a section contains."""
    if not parameters:
        return {}
    options, new_problems = validate_values(ACTIONS[other_programs.SERVE].options, parameters, path)
    problems.extend(new_problems)
    return parameters if options is not None else {}


def _actions(
    value: object,
    path: ValuePath,
    required: bool,
    problems: list[Problem],
    served: Mapping[str, object],
) -> tuple[Action, ...]:
    if value is None:
        if required:
            message = (
                "no actions are given: list them, for example [validate, train] "
                f"({', '.join(ACTIONS)})"
            )
            problems.append(Problem(path, message, on_key=True))
        return ()
    actions = []
    for item in _split(value, path, problems):
        name = canonical_action(item.name)
        if name is None:
            problems.append(Problem(item.path, unknown_action(item.name), on_key=True))
            continue
        kind, parameters = ACTIONS[name], item.parameters
        if kind.scalar and parameters is not None and not isinstance(parameters, Mapping):
            parameters = {kind.scalar: parameters}
        if name == other_programs.SERVE and isinstance(parameters, Mapping):
            parameters = other_programs.without_fixed_values(parameters)
        if served and name == other_programs.SERVE and isinstance(parameters, Mapping | None):
            parameters = {**served, **(parameters or {})}
        options, new_problems = validate_values(kind.options, parameters, item.parameter_path)
        problems.extend(new_problems or empty_texts(item.parameters, item.parameter_path))
        if options is not None:
            actions.append(Action(name, options, item.path, item.parameter_path))
    return tuple(actions)


def _split(value: object, path: ValuePath, problems: list[Problem]) -> list[_RawAction]:
    """Split an `actions` value: one name, a list of names and mappings, or one mapping."""
    raw_actions: list[_RawAction] = []
    if isinstance(value, Mapping):
        items = [({name: parameters}, path) for name, parameters in value.items()]
    elif isinstance(value, list):
        items = [(item, (*path, i)) for i, item in enumerate(value)]
    else:
        items = [(value, path)]
    for item, item_path in items:
        if isinstance(item, str):
            raw_actions.append(_RawAction(item, None, item_path, item_path))
        elif not isinstance(item, Mapping) or not item:
            message = f"an action is a name or a mapping of a name to parameters, got {item!r}"
            problems.append(Problem(item_path, message))
        elif len(item) == 1:
            name, parameters = next(iter(item.items()))
            raw_actions.append(
                _RawAction(str(name), parameters, (*item_path, name), (*item_path, name))
            )
        else:
            _several_keys(item, item_path, raw_actions, problems)
    if not items:
        problems.append(Problem(path, f"no action is given (known: {', '.join(ACTIONS)})"))
    return raw_actions


def _several_keys(
    item: Mapping[Any, Any],
    item_path: ValuePath,
    raw_actions: list[_RawAction],
    problems: list[Problem],
) -> None:
    """Handle `- serve:` whose parameters lack indentation: YAML parses one mapping of many keys."""
    name, first = next(iter(item.items()))
    parameters = {key: value for key, value in item.items() if key != name}
    if canonical_action(name) and first is None and not any(map(canonical_action, parameters)):
        raw_actions.append(_RawAction(str(name), parameters, (*item_path, name), item_path))
        return
    message = (
        f"one list item holds several keys ({', '.join(map(str, item))}): start each action "
        "with its own dash, and indent its parameters below its name"
    )
    problems.append(Problem((*item_path, next(iter(parameters))), message, on_key=True))
