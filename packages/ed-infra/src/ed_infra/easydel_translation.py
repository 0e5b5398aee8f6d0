"""Translate the keys of EasyDeL that `ed_infra.easydel_keys` lists to the keys of this project.

`translate_keys` receives the sections of a run file, or the options of a trainer as one section.
Nothing behind it knows the spellings of EasyDeL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ed_infra.easydel_keys import (
    IDLE_KEYS,
    OTHER_VALUES,
    SECOND_NAMES,
    SECTION_NAMES,
    VALUE_NAMES,
    OtherKey,
    easydel_keys,
)
from ed_infra.easydel_rules import KEY_RULES, Given, Replacement, SectionPath, Values
from ed_infra.errors import did_you_mean

#: The key with the tasks of benchmarks; in EasyDeL also with their options.
BENCHMARKS = ("trainer", "benchmarks")

#: Section -> the keys that its option class has, and their aliases.
KnownKeys = Callable[[str], Collection[str]]


class UntranslatedKey(NamedTuple):
    """A key that cannot be translated.

    Attributes:
        path: The key.
        message: The value, the reason and what to write instead.
        on_key: Whether the message is about the key, not about its value.
    """

    path: SectionPath
    message: str
    on_key: bool = True


@dataclass
class Translation:
    """Sections with the keys of this project.

    Attributes:
        sections: The sections.
        moved: Path of a value -> path of EasyDeL's key.
        unneeded: Reason -> keys without effect, as `section.key`.
        refusals: Keys that cannot be translated.
        without_data: Keys about the data of a run that has none.
        typed: All keys and values in the spelling of EasyDeL.
    """

    sections: dict[str, object]
    moved: dict[SectionPath, SectionPath] = field(default_factory=dict)
    unneeded: dict[str, list[str]] = field(default_factory=dict)
    refusals: list[UntranslatedKey] = field(default_factory=list)
    without_data: list[SectionPath] = field(default_factory=list)
    typed: list[SectionPath] = field(default_factory=list)

    def describe_unneeded(self) -> str:
        """Return one line about all keys without effect; empty without such keys."""
        parts = [f"{', '.join(keys)} ({reason})" for reason, keys in self.unneeded.items()]
        if not parts:
            return ""
        return f"keys of EasyDeL that are not needed here: {'; '.join(parts)}"

    def place(self, path: SectionPath, value: object, source: SectionPath) -> None:
        """Set a value at a path, unless another key sets it."""
        other = self.moved.get(path, path)
        inner, present = _value_at(self.sections, path)
        if isinstance(value, Replacement):
            self.sections = _with_value(self.sections, path, value.value)
            if not present:
                self.moved[path] = source
            return
        if present and (inner != value or (path[0] == source[0] and path not in self.moved)):
            message = f"{'.'.join(source)} and {'.'.join(other)} are one option: keep one of them"
            self.refusals.append(UntranslatedKey(source, message))
            return
        if path[0] == "mixture" and not isinstance(self.sections.get("mixture"), Mapping):
            self.without_data.append(source)
            return
        if not present:
            self.sections = _with_value(self.sections, path, value)
            self.moved[path] = source

    def remove(self, path: SectionPath) -> None:
        """Remove a key, and the mapping around it if it is empty then."""
        self.sections = _without_key(self.sections, path)


def translate_keys(sections: Values, known: KnownKeys, method: str = "") -> Translation:
    """Return the sections with the keys of this project.

    Args:
        sections: Section -> its keys and values; other values than mappings stay.
        known: Returns the keys of a section. A key that a section has is not translated.
        method: The method of the trainer.
    """
    out = Translation(dict(sections))
    for other, name in SECTION_NAMES.items():
        if other in out.sections:
            _rename_section(out, other, name)
    _benchmarks(out, known)
    table = easydel_keys()
    parents = {(one.section, one.name.rpartition(".")[0]) for one in _entries(table)}
    for section in tuple(out.sections):
        if isinstance(out.sections[section], Mapping):
            _refuse_values(out, section)
            _drop_second_names(out, section)
            _drop_idle_keys(out, section)
            _rename_values(out, section)
            _translate_mapping(out, (section,), known(section), method, parents)
    return out


def translate_arguments(
    values: Values, known: Collection[str], method: str
) -> tuple[Values, list[tuple[str, str]], str]:
    """Translate options of a trainer outside of a run file.

    A key whose place is another section stays, because the options have no sections.

    Args:
        values: Option -> value.
        known: The options of the method, with their aliases.
        method: The method.

    Returns:
        The options, the keys that cannot be translated with a message, and a line about keys
        without effect, or an empty text.
    """
    out = translate_keys({"trainer": values}, lambda name: known, method)
    trainer = out.sections["trainer"]
    assert isinstance(trainer, Mapping)
    elsewhere = {source[1] for target, source in out.moved.items() if target[0] != "trainer"}
    kept = {key: values[key] for key in (*elsewhere, *(path[1] for path in out.without_data))}
    problems = [(str(one.path[1]), one.message) for one in out.refusals]
    return {**trainer, **kept}, problems, out.describe_unneeded()


def _entries(table: Mapping[tuple[str, str], tuple[OtherKey, ...]]) -> Iterable[OtherKey]:
    return (entry for entries in table.values() for entry in entries)


def find_entry(section: str, name: str, method: str = "") -> OtherKey | None:
    """Return the entry of a key; an entry of the method precedes one of all methods."""
    entries = easydel_keys().get((section, name), ())
    fitting = [one for one in entries if not one.methods or method in one.methods]
    return max(fitting, key=lambda one: bool(one.methods), default=None)


def _translate_mapping(
    out: Translation,
    path: SectionPath,
    known: Collection[str],
    method: str,
    parents: set[tuple[str, str]],
) -> None:
    section, prefix = path[0], ".".join(path[1:])
    values, _ = _value_at(out.sections, path)
    assert isinstance(values, Mapping)
    for key, value in tuple(values.items()):
        name = f"{prefix}.{key}" if prefix else str(key)
        entry = None if not prefix and key in known else find_entry(section, name, method)
        if entry is not None:
            out.remove((*path, key))
            out.typed.append((*path, str(key)))
            if value is not None and not _is_among(value, entry.harmless):
                _apply(out, entry, (*path, key), value, values)
        elif (section, name) in parents and not prefix and key not in known and value is None:
            out.remove((*path, key))
        elif (section, name) in parents and isinstance(value, Mapping):
            _translate_mapping(out, (*path, key), known, method, parents)
            if not prefix and key not in known:
                _refuse_rest(out, (section, str(key)))


def _apply(
    out: Translation, entry: OtherKey, path: SectionPath, value: object, values: Values
) -> None:
    shown = ".".join(path)
    if entry.kind == "unneeded":
        out.unneeded.setdefault(entry.text, []).append(shown)
        return
    if entry.kind == "refused":
        instead = entry.text if entry.text.startswith("omit it") else f"use {entry.text}"
        out.refusals.append(UntranslatedKey(path, f"{value!r} is not supported; {instead}"))
        return
    if entry.target:
        out.place(entry.target, value, path)
        return
    try:
        placed = KEY_RULES[entry.section, entry.name](Given(value, values, out.sections))
    except ValueError as error:
        out.refusals.append(UntranslatedKey(path, str(error), on_key=False))
        return
    for target, new in placed.items():
        out.place(target, new, path)


def _refuse_rest(out: Translation, path: SectionPath) -> None:
    """Refuse the remaining keys of a mapping that no section has."""
    rest, present = _value_at(out.sections, path)
    if not present or not isinstance(rest, Mapping):
        return
    section, holder = path
    names = [
        name.removeprefix(f"{holder}.")
        for of, name in easydel_keys()
        if of == section and name.startswith(f"{holder}.")
    ]
    for key in rest:
        hint = did_you_mean(str(key), names)
        message = f"unknown key {key!r}{hint} (known: {', '.join(names)})"
        out.refusals.append(UntranslatedKey((*path, key), message))
    out.remove(path)


def _rename_section(out: Translation, other: str, name: str) -> None:
    value = out.sections.pop(other)
    out.typed.append((other,))
    if name in out.sections:
        message = f"{other} and {name} are two names of one section: keep {name}"
        out.refusals.append(UntranslatedKey((other,), message))
        return
    out.sections[name] = value
    out.moved[name,] = (other,)


def _drop_second_names(out: Translation, section: str) -> None:
    for (of, second), first in SECOND_NAMES.items():
        value, present = _value_at(out.sections, (of, second))
        other, has_other = _value_at(out.sections, (of, first))
        if (
            of == section
            and present
            and has_other
            and (value is None or _is_among(value, (other,)))
        ):
            out.remove((of, second))


def _drop_idle_keys(out: Translation, section: str) -> None:
    for (of, key), (names, values, reason) in IDLE_KEYS.items():
        value, _ = _value_at(out.sections, (of, key))
        needed = [_value_at(out.sections, (of, name))[0] for name in names]
        if of == section and value is not None and all(_is_among(one, values) for one in needed):
            out.remove((of, key))
            out.unneeded.setdefault(reason, []).append(f"{of}.{key}")


def _refuse_values(out: Translation, section: str) -> None:
    for (of, key), instead in OTHER_VALUES.items():
        value, present = _value_at(out.sections, (of, key))
        name = _fold(value)
        if of == section and present and name in instead:
            message = f"{value!r} is not supported; use {instead[name]}"
            out.refusals.append(UntranslatedKey((of, key), message, on_key=False))
            out.remove((of, key))


def _rename_values(out: Translation, section: str) -> None:
    for (of, key), names in VALUE_NAMES.items():
        value, present = _value_at(out.sections, (of, key))
        if of == section and present and isinstance(value, str) and value in names:
            out.sections = _with_value(out.sections, (of, key), names[value])
            out.typed.append((of, key))


def _fold(value: object) -> str:
    return str(value).lower().replace("-", "_")


def has_other_spelling(place: SectionPath, value: str) -> bool:
    """Return whether a value of a key has another name here, or is an error.

    Args:
        place: The section and the key.
        value: The value.
    """
    section, key = place
    return value in VALUE_NAMES.get((section, key), ()) or _fold(value) in OTHER_VALUES.get(
        (section, key), ()
    )


def _is_among(value: object, choices: Collection[object]) -> bool:
    """Return whether a value is among some values; true and 1 are different values."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in choices)


def _value_at(values: object, path: SectionPath) -> tuple[object, bool]:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return None, False
        values = values[key]
    return values, True


def _with_value(values: Values, path: SectionPath, value: object) -> dict[str, object]:
    key, *rest = path
    inner = values.get(key)
    if rest and inner is not None and not isinstance(inner, Mapping):
        return dict(values)  # an invalid section, which validation reports
    if rest:
        value = _with_value(inner if isinstance(inner, Mapping) else {}, tuple(rest), value)
    return {**values, key: value}


def _without_key(values: Values, path: SectionPath) -> dict[str, object]:
    key, *rest = path
    out = dict(values)
    inner = out[key]
    if not rest:
        del out[key]
    elif isinstance(inner, Mapping):
        out[key] = _without_key(inner, tuple(rest))
        if not out[key] and len(rest) == 1 and len(path) > 2:
            del out[key]
    return out


def _benchmarks(out: Translation, known: KnownKeys) -> None:
    """Separate the tasks of benchmarks from their options, which are keys of `eval`."""
    source = BENCHMARKS
    value, _ = _value_at(out.sections, source)
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list | tuple) or not any(isinstance(e, Mapping) for e in entries):
        return
    tasks: list[object] = []
    options: list[Values] = []
    for entry in entries:
        keys = dict(entry) if isinstance(entry, Mapping) else {"tasks": entry}
        named = keys.pop("tasks", keys.get("name"))
        keys.pop("name", None)
        tasks += named if isinstance(named, list | tuple) else [named]
        options.append(keys)
    if any(one != options[0] for one in options):
        message = "the benchmarks have different options: all benchmarks of a run have the same"
        out.refusals.append(UntranslatedKey(source, message))
        return
    inner = translate_keys({"eval": options[0]}, known)
    for reason, names in inner.unneeded.items():
        shown = [name.replace("eval.", "trainer.benchmarks.", 1) for name in names]
        out.unneeded.setdefault(reason, []).extend(shown)
    out.refusals += [one._replace(path=source, on_key=True) for one in inner.refusals]
    out.sections = _with_value(out.sections, source, tasks)
    if inner.sections["eval"]:
        out.place(("trainer", "benchmark_options"), inner.sections["eval"], source)
