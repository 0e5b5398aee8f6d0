"""The command `explain`: what a key of a run file or a flag of `esurge serve` means. No jax."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from ed_esurge.command.program import Result, show_result
from ed_infra.errors import ConfigError, did_you_mean, list_near_names, unknown_name

if TYPE_CHECKING:
    from ed_elarge.config.reference import Key

#: Facts of a key that are printed, in this order.
_SHOWN = ("type", "default", "one of", "bounds", "other names", "flag", "elsewhere", "documented")
Facts = dict[str, object]


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A key of a run file (learning_rate, trainer.beta), a section, a flag of "
            "`esurge serve`, or a name of another program."
        ),
    ],
) -> Result:
    """Print what a key or a flag means: type, default, bounds, its other names, and its page.

    A name without a section is found in all sections. A name of Hugging Face, TRL, Axolotl,
    EasyDeL, vLLM or llama.cpp is explained by its place here.
    """
    from ed_elarge.command import key_search
    from ed_elarge.config import reference
    from ed_elarge.config.table import ACTIONS, SECTIONS

    name = key.partition("=")[0]
    if not name.startswith("-"):
        path = [part for part in name.split(".") if part]
        start = 2 if path and path[0] == "actions" else 1
        owners = reference.classes(".".join(path[:start])) if path else {}
        if owners:
            return _explain_path(name, path, start)
        if len(path) != 1:
            section_names = [*SECTIONS, *(f"actions.{action}" for action in ACTIONS)]
            raise unknown_name("section", ".".join(path[:start]) or key, section_names)
    word = name.lstrip("-").replace("-", "_")
    explained = [
        facts
        for place, kinds in key_search.find_places(word).items()
        for facts in _describe_path(place.split("."), kinds)
    ]
    flag = key_search.find_flag(word)
    if flag is not None:
        explained.append(_describe_flag(flag))
    explained += _describe_method(word)
    foreign = [] if explained else key_search.find_foreign_names(name)
    if not explained and not foreign:
        near_names = list_near_names(word, key_search.list_all_names())
        hint = f"; near names: {', '.join(near_names)}" if near_names else ""
        raise ConfigError(f"there is no key, flag or section {key!r}{hint}")
    for facts in explained:
        _show_facts(facts)
    for one in foreign:
        show_result(f"{one.name} ({one.program})\n  here: {one.place}")
    return Result({"keys": explained, "foreign": [one._asdict() for one in foreign]})


def _explain_path(name: str, path: list[str], start: int) -> Result:
    """Explain a section, or a key with its path."""
    from ed_elarge.config import reference

    owners = reference.classes(".".join(path[:start]))
    if len(path) == start:
        doc = next(iter(owners.values())).__doc__ or ""
        meaning = textwrap.dedent(doc).strip()
        names = dict.fromkeys(key for model in owners.values() for key in model.model_fields)
        show_result(meaning)
        show_result(textwrap.fill(f"keys: {', '.join(names)}", 100))
        return Result({"meaning": meaning, "keys": [*names]})
    explained = _describe_path(path, ())
    if not explained:
        holder = reference.find_keys(path[:-1]) if len(path) > start + 1 else []
        models = [reference.find_option_class(one.field.annotation) for one in holder] or [
            *owners.values()
        ]
        known_names = {
            known
            for model in models
            if model
            for known in (*model.model_fields, *getattr(model, "ALIASES", ()))
        }
        raise ConfigError(f"there is no key {name!r}{did_you_mean(path[-1], known_names)}")
    for facts in explained:
        _show_facts(facts)
    return Result({"keys": explained})


def _describe_path(path: Sequence[str], kinds: Sequence[str]) -> list[Facts]:
    """Return the facts of a key, for each of its descriptions.

    Args:
        path: the path of the key.
        kinds: the values of `trainer_type` of interest; empty: all.
    """
    from ed_elarge.command import key_search
    from ed_elarge.config import reference

    if [*path[:2]] == ["base_config", "values"] and len(path) == 3:
        return [_describe_field(path[2])]
    explained = []
    every_kind = [*reference.classes(path[0])] if path[0] != "actions" else []
    for one in reference.find_keys(path):
        if any(kinds) and not set(one.kinds) & set(kinds):
            continue
        place = ".".join([*path[:-1], one.name])
        facts: Facts = {
            "key": place,
            "methods": [] if [*one.kinds] == every_kind else [*one.kinds],
            "type": reference.describe_type(one.field.annotation).replace("\\|", "|"),
            "default": reference.describe_default(one.field).strip("`"),
            "one of": reference.list_known_names(one.field),
            "bounds": key_search.describe_bounds(one.field),
            "other names": ", ".join(one.others),
            "flag": key_search.get_flag(place),
            "elsewhere": _format_names(key_search.list_foreign_names(place)),
            "documented": key_search.find_page(place, one.kinds),
            "meaning": one.meaning,
        }
        explained.append(facts)
    return explained


def _describe_field(name: str) -> Facts:
    """Return the facts of an execution field of the model."""
    from ed_infra.config.fields import FIELD_ALIASES, FIELDS, canonical_field

    field = FIELDS.get(canonical_field(name))
    if field is None:
        hint = did_you_mean(name, [*FIELDS, *FIELD_ALIASES])
        raise ConfigError(
            f"{name!r} is no execution field{hint}; it may be a key of an architecture"
        )
    return {
        "key": f"base_config.values.{canonical_field(name)}",
        "methods": [],
        "default": field.default,
        "documented": "docs/config_reference.md",
        "meaning": field.doc,
    }


def _describe_flag(key: Key) -> Facts:
    from ed_esurge.command.flags import format_flag

    from ed_elarge.command import key_search
    from ed_elarge.config import reference

    flag = format_flag(key.name)
    return {
        "key": f"{flag} of `esurge serve`",
        "methods": [],
        "type": reference.describe_type(key.field.annotation).replace("\\|", "|"),
        "default": reference.describe_default(key.field).strip("`"),
        "one of": reference.list_known_names(key.field),
        "bounds": key_search.describe_bounds(key.field),
        "other names": ", ".join(map(format_flag, key.others)),
        "elsewhere": _format_names(key_search.list_foreign_names(flag)),
        "documented": key_search.find_page(flag, ()),
        "meaning": key_search.describe_flag(key),
    }


def _describe_method(name: str) -> list[Facts]:
    """Return the facts of a training method, if the name is one."""
    from ed_trainers.arguments import METHODS

    if name not in METHODS:
        return []
    doc = " ".join((METHODS[name].arguments.__doc__ or "").split())
    return [
        {
            "key": f"trainer.trainer_type: {name}",
            "methods": [],
            "documented": f"docs/yaml.md, trainer (trainer_type: {name})",
            "meaning": doc,
        }
    ]


def _format_names(names: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{program}: {', '.join(others)}" for program, others in names.items())


def _show_facts(facts: Facts) -> None:
    methods = facts["methods"]
    assert isinstance(methods, list)
    suffix = f" ({', '.join(methods)})" if methods else ""
    show_result(f"{facts['key']}{suffix}")
    for name in _SHOWN:
        value = facts.get(name, "")
        if value or (name == "default" and name in facts):
            text = textwrap.fill(f"{name}: {value}", 96, break_on_hyphens=False)
            show_result(textwrap.indent(text, "  "))
    if facts["meaning"]:
        show_result(textwrap.indent(textwrap.fill(str(facts["meaning"]), 96), "  "))
