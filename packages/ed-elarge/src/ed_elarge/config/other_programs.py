"""Keys of EasyDeL in a run file: their translation, with the locations of the typed keys.

`ed_infra.easydel_keys` lists the keys. `normalize` translates them before validation, so that the
code behind it sees the keys of this project only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ed_infra.easydel_keys import SECOND_NAMES, SECTION_NAMES, SERVE_VALUES, easydel_keys
from ed_infra.easydel_rules import SectionPath
from ed_infra.easydel_translation import (
    BENCHMARKS,
    Translation,
    has_other_spelling,
    translate_keys,
)
from ed_trainers.arguments import METHODS
from ed_trainers.options.other_names import EQUIVALENT

from ed_elarge.config.checks.training import GENERATING
from ed_elarge.config.table import SECTIONS, Section
from ed_elarge.errors import Document, Problem, ValuePath

LocationT = TypeVar("LocationT")

#: Keys that TRL and other programs have, too; they do not show that a file is EasyDeL's.
_OF_SEVERAL_PROGRAMS = frozenset(EQUIVALENT)
#: Name of the action with some parameters that EasyDeL has in the section `esurge`.
SERVE = "serve"


class Translated(NamedTuple):
    """A document with the keys of this project.

    Attributes:
        document: The document, which also has the locations of the new keys.
        sections: Its sections.
        parameters: Parameters of the actions `serve`, unless an action sets them.
        problems: Keys that cannot be translated; their paths start at the top of the file.
        note: One line about keys without effect, or nothing.
    """

    document: Document
    sections: Mapping[str, Any]
    parameters: Mapping[str, object]
    problems: list[Problem]
    note: str


def translate_document(
    document: Document, sections: Mapping[str, Any], prefix: ValuePath
) -> Translated:
    """Return a document without keys of EasyDeL; see `has_other_keys`.

    Args:
        document: The document.
        sections: Its sections.
        prefix: Path of the sections.
    """
    out = translate_sections(sections)
    problems = [Problem((*prefix, *one.path), one.message, one.on_key) for one in out.refusals]
    values = out.sections
    notes = [note] if (note := out.describe_unneeded()) else []
    if not _OF_SEVERAL_PROGRAMS.issuperset(path[-1] for path in out.typed):
        notes += _count_prompts(values)
        notes += _drop_previews(values)
    parameters = values.pop(SERVE, {})
    assert isinstance(parameters, Mapping)
    moved = _move_locations(document, out.moved, prefix) if document.text else document
    return Translated(moved, values, parameters, problems, ". ".join(notes))


def _count_prompts(sections: dict[str, Any]) -> list[str]:
    """Let the batch of a method that compares completions count prompts, as EasyDeL does.

    Returns:
        A sentence that says so, or nothing.
    """
    trainer = sections.get("trainer")
    if not isinstance(trainer, Mapping) or "batch_unit" in trainer:
        return []
    if "batch_unit" not in _known_keys("trainer", trainer):
        return []
    sections["trainer"] = {**trainer, "batch_unit": "prompts"}
    return ["total_batch_size counts prompts, as in EasyDeL (trainer.batch_unit: prompts)"]


def _drop_previews(sections: dict[str, Any]) -> list[str]:
    """Remove the keys of previews if the model generates no text; EasyDeL ignores them then.

    Returns:
        A sentence that says so, or nothing.
    """
    trainer = sections.get("trainer")
    method = SECTIONS["trainer"].choose_kind(trainer, ())
    if not isinstance(trainer, Mapping) or not isinstance(method, str):
        return []
    names = [name for name in trainer if str(name).startswith("generation_")]
    if not names or METHODS[method].task in GENERATING:
        return []
    sections["trainer"] = {name: trainer[name] for name in trainer if name not in names}
    listed = ", ".join(f"trainer.{name}" for name in names)
    return [f"{listed}: the model of {method} generates no text"]


def translate_sections(sections: Mapping[str, object]) -> Translation:
    """Translate the sections of a run file."""
    trainer = sections.get("trainer")
    method = SECTIONS["trainer"].choose_kind(trainer, ())
    return translate_keys(
        sections,
        lambda name: _known_keys(name, sections.get(name)),
        method if isinstance(method, str) else "",
    )


def _known_keys(name: str, value: object) -> Collection[str]:
    section = SECTIONS.get(name)
    if section is None:
        return ()
    kind = section.choose_kind(value, ())
    return _keys_of(section, kind if isinstance(kind, str) else next(iter(section.classes())))


def _keys_of(section: Section, kind: str) -> Collection[str]:
    cls = section.classes()[kind]
    return {*cls.model_fields, *cls.ALIASES}


@cache
def _parent_keys() -> frozenset[tuple[str, str]]:
    """Return (section, key) of the mappings that contain keys of EasyDeL."""
    names = ((section, name.rpartition(".")[0]) for section, name in easydel_keys())
    return frozenset((section, parent) for section, parent in names if parent)


def has_other_keys(sections: Mapping[str, Any]) -> bool:
    """Return whether a run file may have keys or values of EasyDeL, which need a translation."""
    return any(
        name in SECTION_NAMES or (isinstance(value, Mapping) and _needs_translation(name, value))
        for name, value in sections.items()
    )


def _needs_translation(section: str, values: Mapping[str, object], prefix: str = "") -> bool:
    """Return whether a mapping of a section may have keys or values of EasyDeL.

    Args:
        section: The section.
        values: The section, or a mapping inside.
        prefix: The keys that lead to the mapping, each with a dot behind it.
    """
    for key, value in values.items():
        place = (section, f"{prefix}{key}")
        if place in easydel_keys() or place in SECOND_NAMES or place == BENCHMARKS:
            return True
        if isinstance(value, str) and has_other_spelling(place, value):
            return True
        if place in _parent_keys():
            if not prefix and key not in _known_keys(section, values):
                return True
            if isinstance(value, Mapping) and _needs_translation(section, value, f"{place[1]}."):
                return True
    return False


def _move_locations(
    document: Document, moved: Mapping[SectionPath, SectionPath], prefix: ValuePath
) -> Document:
    """Return a document in which a new key has the location of the typed key."""
    places = [((*prefix, *old), (*prefix, *new)) for new, old in moved.items()]
    return replace(
        document,
        keys=_with_places(document.keys, places),
        values=_with_places(document.values, places),
        owners=_with_places(document.owners, places),
    )


def _with_places(
    locations: Mapping[ValuePath, LocationT], places: Sequence[tuple[ValuePath, ValuePath]]
) -> dict[ValuePath, LocationT]:
    out = dict(locations)
    for old, new in places:
        for path, location in locations.items():
            if path[: len(old)] == old:
                out.setdefault((*new, *path[len(old) :]), location)
    return out


def without_fixed_values(parameters: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters of an action serve without those whose only value changes nothing."""
    return {
        name: value
        for name, value in parameters.items()
        if name not in SERVE_VALUES or value not in (None, SERVE_VALUES[name])
    }
