"""The names of EasyDeL's documents, and their places in this repository.

`tests/guides/documents` contains the documents. Keys come from the YAML blocks, Python names from
the Python blocks and from `tools.config_reference.DOCUMENTED`. Places come from the option classes,
from the tables of aliases, and from the objects themselves.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from ed_elarge.config import reference
from ed_elarge.config.table import ACTIONS, canonical_action
from ed_infra.config.fields import FIELDS, canonical_field
from ed_infra.easydel_keys import OtherKey, easydel_keys
from ed_infra.easydel_translation import find_entry

from tools.config_reference import DOCUMENTED
from tools.easydel_types import type_table
from tools.pages import heading, row
from tools.workspace import ROOT

DOCUMENTS = ROOT / "tests/guides/documents"
_BLOCK = re.compile(r"^( *)```(yaml|python)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
#: Keys below these keys belong to other programs, or are names that the user chooses.
_FREE = ("format_fields", "operation_configs", "mixture_weights", "values")


def blocks(document: str, language: str) -> list[str]:
    """Return the code blocks of a document in one language."""
    text = (DOCUMENTS / f"{document}.txt").read_text("utf-8")
    return [textwrap.dedent(body) for _, name, body in _BLOCK.findall(text) if name == language]


def keys() -> list[tuple[str, ...]]:
    """Return the paths of all documented keys, in order; an action is `("actions", name, ...)`."""
    found: dict[tuple[str, ...], None] = {}
    for block in blocks("004", "yaml"):
        # A block may show several values of one section, one after the other.
        for part in re.split(r"\n\s*\n(?=#)", block):
            for section, value in (yaml.safe_load(part) or {}).items():
                found |= dict.fromkeys(_below((section,), value))
    text = (DOCUMENTS / "004.txt").read_text("utf-8")
    table = text.split("## Trainer Types")[1].split("\n## ")[0]
    for line in table.splitlines():
        for name in re.findall(r"`(\w+)`", "|".join(line.split("|")[3:])):
            found[("trainer", name)] = None
    return [path for path in found if path != ("actions",)]


def _below(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    if path[-1] not in ("actions", "informs"):
        yield path
    if path == ("actions",):
        for item in value:
            named = item if isinstance(item, Mapping) else {item: None}
            for name, parameters in named.items():
                yield from _below(("actions", canonical_action(name) or name), parameters)
    elif isinstance(value, list):
        for item in (one for one in value if isinstance(one, Mapping)):
            for key, inner in item.items():
                yield from _below((*path, str(key)), inner)
    elif isinstance(value, Mapping) and path[-1] not in _FREE:
        for key, inner in value.items():
            yield from _below((*path, str(key)), inner)


def place_of_key(path: tuple[str, ...]) -> tuple[str, str]:
    """Return the canonical path of a key, and the methods that have the key (empty: all).

    Raises:
        LookupError: No section has the key.
    """
    section, *rest = path
    if not rest or (section == "actions" and len(rest) == 1):
        return section, ""
    entry = find_entry(section, ".".join(rest))
    if entry is not None and entry.kind == "works":
        return _place_of_entry(entry), ", ".join(entry.methods)
    found = reference.find_keys(path)
    if not found:
        raise LookupError(f"{'.'.join(path)} has no place in a run file")
    names = list(dict.fromkeys(key.name for key in found))
    kinds = sorted({kind for key in found for kind in key.kinds})
    every = sorted(reference.classes(path[0])) if path[0] != "actions" else [""]
    named = [".".join((*path[:-1], name)) for name in names]
    return " or ".join(f"`{one}`" for one in named), "" if kinds == every else ", ".join(kinds)


def key_tables() -> list[str]:
    """Return the table of changed keys, and the table of keys with the same name here."""
    changed = heading("EasyDeL", "here", "methods")
    same: dict[str, list[str]] = {}
    for path in keys():
        place, kinds = place_of_key(path)
        section, *rest = path
        if section == "actions":
            section = f"actions: {rest.pop(0)}"
        elif rest and place != f"`{'.'.join(path)}`":
            changed.append(row(f"`{'.'.join(path)}`", place, kinds))
            continue
        same.setdefault(section, []).extend([".".join(rest)] * bool(rest))
    entries = [entry for group in easydel_keys().values() for entry in group]
    for entry in (one for one in entries if one.kind == "works"):
        methods = ", ".join(entry.methods)
        changed.append(row(f"`{entry.section}.{entry.name}`", _place_of_entry(entry), methods))
    for name, kind in ACTIONS.items():
        for other in kind.aliases:
            changed.append(row(f"`actions: {other}`", f"`actions: {name}`", ""))
    lines = heading("section or action", "keys with the same name and meaning here")
    for section, names in same.items():
        lines.append(row(f"`{section}`", ", ".join(f"`{name}`" for name in names)))
    return [*changed, "", *lines, "", *_unneeded(entries), "", *_refused(entries)]


def _place_of_entry(entry: OtherKey) -> str:
    """Return the cell with the place of a key that works."""
    path = ".".join(entry.target)
    return f"`{path}`" if path == entry.text else instead(entry.text)[0]


def _unneeded(entries: list[OtherKey]) -> list[str]:
    """Return the table of the keys that are accepted without effect."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        if entry.kind == "unneeded":
            reasons.setdefault(entry.text, []).append(f"`{entry.section}.{entry.name}`")
    lines = ["### Keys that are accepted and not needed", ""]
    lines += ["A run prints one line that names the keys of this table.", ""]
    lines += heading("EasyDeL", "reason")
    return [*lines, *(row(", ".join(names), reason) for reason, names in reasons.items())]


def _refused(entries: list[OtherKey]) -> list[str]:
    """Return the table of the keys that are errors, with what to write instead."""
    lines = ["### Keys that are errors", ""]
    lines += [
        "The values of the second column change nothing, so they are accepted; null is, too.",
        "",
    ]
    lines += heading("EasyDeL", "accepted values", "instead", "methods")
    for entry in entries:
        if entry.kind == "refused":
            values = ", ".join(f"`{_yaml_value(value)}`" for value in entry.harmless)
            key = f"`{entry.section}.{entry.name}`"
            lines.append(row(key, values, *instead(entry.text), ", ".join(entry.methods)))
    return lines


def _yaml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def instead(text: str) -> list[str]:
    """Return the cell that states the equivalent of a key."""
    text = text.replace("|", "\\|")
    text = text if "`" in text else text.replace("<", "\\<")
    return [f"none: {text.removeprefix('omit it: ')}" if text.startswith("omit it: ") else text]


def python_names() -> dict[str, str]:
    """Return documented name -> where the object is defined here.

    Raises:
        LookupError: A documented name is missing here.
    """
    found: dict[str, str] = {}
    for document in ("000", "001", "004"):
        for block in blocks(document, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("easydel"):
                    found |= {one.name: _place(one.name) for one in node.names}
                elif isinstance(node, ast.Attribute):
                    found |= _attribute(node, document)
    for group, listed in DOCUMENTED.items():
        if not group.startswith("Parameters"):
            for name in (name for name in listed.split() if "(" not in name):
                found |= _documented(name, group)
    return found


def _documented(name: str, group: str) -> dict[str, str]:
    """Return the place of a name that a page of EasyDeL's reference lists."""
    import easydel

    if name == "easydel.infra":  # a module
        return {}
    owner, _, attribute = name.rpartition(".")
    owner = "EasyDeLBaseModule" if owner == "model" else owner
    if owner:
        return {f"{owner}.{attribute}": _place(owner, attribute)}
    config, module = "EasyDeLBaseConfig", "EasyDeLBaseModule"
    first = (config, module) if group.startswith("Methods") else (module, config)
    for cls in (*first, "LlamaForCausalLM"):
        if not name[0].isupper() and hasattr(getattr(easydel, cls), name):
            return {f"{cls}.{name}": _place(cls, name)}
    return {name: _place(name)}


def _attribute(node: ast.Attribute, document: str) -> dict[str, str]:
    """Return the place of an attribute in a block: of `ed`, or of a documented class."""
    import easydel

    if isinstance(node.value, ast.Name) and node.value.id == "ed":
        return {node.attr: _place(node.attr)}
    classes = ["eLargeModel"] if document == "004" else ["EasyDeLBaseModule", "EasyDeLBaseConfig"]
    for name in classes:
        if hasattr(getattr(easydel, name), node.attr) and not node.attr.startswith("__"):
            return {f"{name}.{node.attr}": _place(name, node.attr)}
    return {}


def _place(name: str, attribute: str = "") -> str:
    """Return the module and the name of an object of `easydel`, or of an attribute of its class."""
    import easydel
    from easydel._table import NAMES, find_names

    if not attribute:
        module, _, real = {**find_names("easydel"), **NAMES}[name].partition(":")
        value = getattr(easydel, name)
        module = getattr(value, "__module__", module) if isinstance(value, type) else module
        return f"`{module}.{real or name}`"
    cls = getattr(easydel, name)
    for base in cls.__mro__:
        if attribute in vars(base) or attribute in getattr(base, "__annotations__", {}):
            return f"`{base.__module__}.{base.__qualname__}.{attribute}`"
    if attribute in ("__call__", "config"):
        return "every model"
    raise LookupError(f"{name}.{attribute} of EasyDeL's documents is missing")


@cache
def module_table() -> list[str]:
    """Return the table of EasyDeL's module paths, which this repository also has."""
    from easydel._table import MODULES

    lines = heading("module path", "its names come from")
    for path, exports in MODULES.items():
        if path.count(".") > 2:
            continue
        packages = sorted({at.partition(":")[0].partition(".")[0] for at in exports.values()})
        shown = ", ".join(f"`{package}`" for package in packages)
        lines.append(row(f"`{path}`", shown or "its submodules"))
    return lines


def other_name_tables() -> list[str]:
    """Return the table of names that differ here, and the table of names without a counterpart."""
    from easydel._other_names import ABSENT, COUNTERPARTS

    lines = heading("EasyDeL", "here")
    places: dict[str, list[str]] = {}
    for name, at in COUNTERPARTS.items():
        module, _, real = at.partition(":")
        place = module if real == "*" else f"{module}.{real or name}"
        if module == "easydel._found":
            place = "ed_layers.attention.Mechanism" if "Attn" in name else name
        places.setdefault(place, []).append(f"`{name}`")
    lines += [row(", ".join(names), f"`{place}`") for place, names in places.items()]
    lines += ["", *heading("EasyDeL, without a counterpart", "instead")]
    reasons: dict[str, list[str]] = {}
    for name, reason in ABSENT.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return [*lines, *(row(", ".join(names), reason) for reason, names in reasons.items())]


def python_tables() -> list[str]:
    """Return the table of the fields of a configuration, and the table of the other names."""
    (listed,) = (names for group, names in DOCUMENTED.items() if group.startswith("Parameters"))
    plain = [name for name in listed.split() if "(" not in name and name != "UserWarning"]
    fields = [name for name in plain if name in FIELDS]
    aliases = {name: canonical_field(name) for name in plain if name not in FIELDS}
    lines = heading("field of `EasyDeLBaseConfig`", "here")
    lines.append(row(", ".join(f"`{name}`" for name in fields), "the same"))
    for name, field in aliases.items():
        if field in FIELDS:
            lines.append(row(f"`{name}`", f"an alias of `{field}`"))
    keys_of_models = [name for name, field in aliases.items() if field not in FIELDS]
    names = ", ".join(f"`{name}`" for name in keys_of_models)
    lines.append(row(names, "the same, in the configuration of each family"))
    lines += ["", *heading("EasyDeL", "defined in")]
    lines += [row(f"`{name}`", place) for name, place in python_names().items()]
    return lines


def tables() -> str:
    """Return the generated part of docs/migrate/easydel.md."""
    parts = ["## Keys of a run file", "", *key_tables(), ""]
    parts += ["## Module paths", "", *module_table(), ""]
    parts += [
        "The modules below these, such as `easydel.modules.llama.modeling_llama`, exist as well."
    ]
    parts += ["", "## Model types", "", *type_table(), ""]
    parts += ["## Classes, functions and fields", "", *python_tables(), ""]
    parts += ["## Names of EasyDeL 0.3 that differ", "", *other_name_tables()]
    return "\n".join(parts) + "\n"
