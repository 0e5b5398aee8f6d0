"""What a name means: a key of a run file, a flag of `esurge serve`, or a name of another program.

`elarge explain` prints the results. A name is found in every section and action, and in the flags
of the server; `ed_elarge.config.reference` describes each key.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ed_esurge.command.flags import format_flag, read_attribute_docs
from ed_esurge.command.foreign_flags import FOREIGN_FLAGS
from ed_esurge.command.load import ModelArguments
from ed_esurge.command.nodes import NodeOptions
from ed_infra.config.fields import FIELDS
from ed_infra.easydel_keys import easydel_keys
from ed_infra.options import Options
from ed_trainers.arguments import METHODS, TrainingArguments
from ed_trainers.options.other_names import AXOLOTL, HUGGING_FACE, SAME, TRL
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ed_elarge.config.other_files import list_rule_places
from ed_elarge.config.reference import Key, classes, find_option_class
from ed_elarge.config.table import ACTIONS, SECTIONS

_VALUES = "base_config.values"
#: Flags of `esurge serve` that are not keys of a run file. The others are those of `esurge` and of
#: the action `serve`.
_ONLY_FLAGS: tuple[type[Options], ...] = (ModelArguments, NodeOptions)
_SHORT_FLAGS = {"tp": "tensor_parallel_size", "q": "quantization"}
_WITHOUT_FLAG = ("model", "engine", "is_one_of_several")
#: Attribute of a constraint of pydantic -> its text.
_BOUNDS = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} items",
    "max_length": "at most {} items",
}
_HUGGING_FACE = {**HUGGING_FACE, **SAME}
# The other programs also have the options of Hugging Face.
_AXOLOTL_PLACES, _TRL_PLACES, _LLAMA_FACTORY_PLACES = (
    {name: place for name, place in places.items() if name not in _HUGGING_FACE}
    for places in list_rule_places()
)
#: Program -> its names of options and their places here.
_FOREIGN_KEYS: Mapping[str, Mapping[str, str]] = {
    "Hugging Face": _HUGGING_FACE,
    "TRL": {**TRL, **_TRL_PLACES},
    "Axolotl": {**AXOLOTL, **_AXOLOTL_PLACES},
    "LLaMA-Factory": _LLAMA_FACTORY_PLACES,
}


class ForeignName(NamedTuple):
    """A name of another program, and its place here."""

    program: str
    name: str
    place: str


def find_places(name: str) -> dict[str, list[str]]:
    """Return the paths of a name in a run file: path -> the values of `trainer_type` that have it.

    Args:
        name: the last part of a key, or another spelling of it.
    """
    found_paths: dict[str, list[str]] = {}
    for path, kind, model in _list_classes():
        canonical_name = getattr(model, "ALIASES", {}).get(name, name)
        if canonical_name in model.model_fields:
            found_paths.setdefault(f"{path}.{canonical_name}", []).append(kind)
    if name in FIELDS:
        found_paths.setdefault(f"{_VALUES}.{name}", [""])
    return found_paths


def find_flag(name: str) -> Key | None:
    """Return a flag of `esurge serve` that is no key of a run file.

    Args:
        name: the name, or another spelling; also a short flag without its dash (`tp`).
    """
    name = _SHORT_FLAGS.get(name, name)
    for model in _ONLY_FLAGS:
        canonical_name = model.ALIASES.get(name, name)
        if canonical_name in model.model_fields and canonical_name not in _WITHOUT_FLAG:
            return Key(canonical_name, model, model.model_fields[canonical_name])
    return None


def describe_flag(key: Key) -> str:
    """Return the meaning of a flag."""
    assert issubclass(key.model, Options)
    return read_attribute_docs(key.model).get(key.name, "")


def get_flag(path: str) -> str:
    """Return the flag of `esurge serve` for the path of a key, or an empty text."""
    section, _, name = path.rpartition(".")
    return format_flag(name) if section in ("esurge", "actions.serve") else ""


def describe_bounds(field: FieldInfo) -> str:
    """Return the bounds of a number or of the length of a list, or an empty text."""
    texts = [
        text.format(_format_number(value))
        for constraint in _list_constraints(field)
        for name, text in _BOUNDS.items()
        if isinstance(value := getattr(constraint, name, None), int | float)
    ]
    return ", ".join(dict.fromkeys(texts))


def _format_number(value: float) -> str:
    return f"{value:,}".replace(",", "") if abs(value) < 1e7 else f"{value:g}"


def _list_constraints(item: object) -> Iterator[object]:
    """Yield the constraints of a field, and of the types of a union in its annotation."""
    if isinstance(item, FieldInfo):
        yield from item.metadata
        yield from _list_constraints(item.annotation)
    elif typing.get_origin(item) is typing.Annotated:
        inner, *metadata = typing.get_args(item)
        for one in metadata:
            yield from _list_constraints(one) if isinstance(one, FieldInfo) else (one,)
        yield from _list_constraints(inner)
    elif typing.get_origin(item) is typing.Union or type(item).__name__ == "UnionType":
        for part in typing.get_args(item):
            yield from _list_constraints(part)


def find_page(path: str, kinds: typing.Sequence[str]) -> str:
    """Return the page and the headline that document a key.

    Args:
        path: the path of the key, or the flag of a server.
        kinds: the values of `trainer_type` that have the key.
    """
    if path.startswith("--"):
        return "docs/serving/start.md"
    section, _, name = re.sub(r"\.\d+(?=\.|$)", "", path).rpartition(".")
    if section == "trainer" and name not in TrainingArguments.model_fields:
        single = f"trainer (trainer_type: {kinds[0]})" if len(kinds) == 1 else ""
        section = single or "trainer: keys of several values of trainer_type"
    return f"docs/yaml.md, {section.replace('actions.', 'actions: ')}"


def find_foreign_names(name: str) -> list[ForeignName]:
    """Return what a name of another program means here, one entry for each program.

    Args:
        name: a key, or a flag with its dashes.
    """
    key = name.lstrip("-").replace("-", "_")
    entries = [
        ForeignName(program, name, keys[key])
        for program, keys in _FOREIGN_KEYS.items()
        if key in keys
    ]
    entries += [
        ForeignName("EasyDeL", f"{section}.{one.name}", one.text)
        for (section, other_name), group in easydel_keys().items()
        if other_name == key
        for one in group[:1]
    ]
    flag_names = {name} if name.startswith("-") else {f"--{name}", f"--{name.replace('_', '-')}"}
    for flag in FOREIGN_FLAGS:
        matching = flag_names.intersection(flag.names)
        if matching:
            place = " ".join(filter(None, (flag.target, flag.value)))
            text = place or flag.refusal or f"without effect: {flag.note}"
            entries.append(ForeignName(flag.program, matching.pop(), text))
    return entries


def list_foreign_names(path: str) -> dict[str, list[str]]:
    """Return the names of a key in other programs: program -> names."""
    name, flag = path.rpartition(".")[2], get_flag(path) or (path if path[:2] == "--" else "")
    names: dict[str, list[str]] = {}
    for program, keys in _FOREIGN_KEYS.items():
        for other, place in keys.items():
            first = re.split(r"[:;, ]", place)[0]
            if first == path or (path.startswith("trainer.") and first == name):
                names.setdefault(program, []).append(other)
    parts = tuple(path.split("."))
    for group in easydel_keys().values():
        names.setdefault("EasyDeL", []).extend(one.name for one in group if one.target == parts)
    for one in FOREIGN_FLAGS:
        if flag and one.target == flag:
            names.setdefault(one.program, []).extend(one.names)
    unique = {program: [*dict.fromkeys(others)] for program, others in names.items()}
    return {
        program: [other for other in others if other not in (name, flag)]
        for program, others in unique.items()
        if any(other not in (name, flag) for other in others)
    }


@cache
def list_all_names() -> frozenset[str]:
    """Return every name that `elarge explain` knows: sections, keys, flags and foreign names."""
    names = {*SECTIONS, *METHODS, *FIELDS, "actions"}
    for _, _, model in _list_classes():
        names |= {*model.model_fields, *getattr(model, "ALIASES", ())}
    for model in _ONLY_FLAGS:
        names |= {*model.model_fields, *model.ALIASES} - {*_WITHOUT_FLAG}
    names |= {name for keys in _FOREIGN_KEYS.values() for name in keys}
    names |= {flag.lstrip("-") for one in FOREIGN_FLAGS for flag in one.names if flag[:2] == "--"}
    return frozenset(names)


@cache
def _list_classes() -> tuple[tuple[str, str, type[BaseModel]], ...]:
    """Return the option classes of a run file: the path, the kind and the class."""
    result: list[tuple[str, str, type[BaseModel]]] = []
    for section in (*SECTIONS, *(f"actions.{name}" for name in ACTIONS)):
        for kind, model in classes(section).items():
            seen: set[type[BaseModel]] = set()
            result.extend((path, kind, one) for path, one in _walk_class(section, model, seen))
    return tuple(result)


def _walk_class(
    path: str, model: type[BaseModel], seen: set[type[BaseModel]]
) -> Iterator[tuple[str, type[BaseModel]]]:
    if model in seen:
        return
    seen.add(model)
    yield path, model
    for name, field in model.model_fields.items():
        inner = find_option_class(field.annotation)
        if inner is not None:
            yield from _walk_class(f"{path}.{name}", inner, seen)
