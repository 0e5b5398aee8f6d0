"""Descriptions of the keys of a run file, from the option classes: meaning, type, names, default.

`docs/yaml.md`, `elarge explain`, `elarge schema` and `elarge init` use these functions. The meaning
of a key is the docstring after its field.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from ed_elarge.config.table import ACTIONS, SECTIONS, canonical_action


class Key(NamedTuple):
    """A key of a run file.

    Attributes:
        name: The canonical name.
        model: The option class that has the key.
        field: The field of the class.
        kinds: The values of `trainer_type` (or another choice) whose class has this description.
    """

    name: str
    model: type[BaseModel]
    field: FieldInfo
    kinds: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """The docstring of the key."""
        return read_meanings(self.model).get(self.name, "")

    @property
    def others(self) -> list[str]:
        """The other spellings of the key."""
        aliases = getattr(self.model, "ALIASES", {})
        return [alias for alias, canonical in aliases.items() if canonical == self.name]


def classes(section: str) -> dict[str, type[BaseModel]]:
    """Return the option classes of a section, or of an action `actions.NAME`, by kind."""
    first, _, action = section.partition(".")
    if first == "actions":
        name = canonical_action(action)
        return {} if name is None else {"": ACTIONS[name].options}
    return dict(SECTIONS[first].classes()) if first in SECTIONS else {}


def find_keys(path: typing.Sequence[str]) -> list[Key]:
    """Return the descriptions of a key, one for each different description; empty if unknown."""
    start = 2 if path[0] == "actions" else 1
    owners = classes(".".join(path[:start]))
    keys_by_description: dict[tuple[str, ...], list[Key]] = {}
    for kind, model in owners.items():
        key = _in_class(model, path[start:])
        if key is not None:
            same = (describe_type(key.field.annotation), describe_default(key.field), key.meaning)
            keys_by_description.setdefault(same, []).append(
                key._replace(kinds=(kind,) if kind else ())
            )
    return [
        group[0]._replace(kinds=tuple(itertools.chain(*(key.kinds for key in group))))
        for group in keys_by_description.values()
    ]


def _in_class(model: type[BaseModel], path: typing.Sequence[str]) -> Key | None:
    if not path:
        return None
    name = getattr(model, "ALIASES", {}).get(path[0], path[0])
    if name not in model.model_fields:
        return None
    field, inner_path = model.model_fields[name], [part for part in path[1:] if not part.isdigit()]
    if not inner_path:
        return Key(name, model, field)
    inner = find_option_class(field.annotation)
    return None if inner is None else _in_class(inner, inner_path)


@functools.cache
def read_meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> the docstring after it, including inherited fields."""
    docstrings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls is BaseModel or not issubclass(cls, BaseModel):
            continue
        for statement, next_statement in itertools.pairwise(
            _bodies(cls.__module__).get(cls.__name__, ())
        ):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(next_statement, ast.Expr)
                and isinstance(next_statement.value, ast.Constant)
            ):
                docstrings[statement.target.id] = " ".join(str(next_statement.value.value).split())
    return docstrings


@functools.cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module, which is parsed once."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def find_option_class(annotation: object) -> type[BaseModel] | None:
    """Return the option class in an annotation, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (find_option_class(part) for part in typing.get_args(annotation))
    return next((model for model in inner if model), None)


def describe_type(annotation: Any) -> str:
    """Describe a type in terms of YAML: `int`, `list of int`, `"a" | "b" | null`."""
    if annotation in (None, type(None)):
        return "null"
    if annotation is Any:
        return "any"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return describe_type(parts[0])
    if origin is Literal:
        return " \\| ".join(yaml_text(part) for part in parts)
    if origin in (typing.Union, types.UnionType):
        parts = tuple(p for p in parts if not any(map(_is_for_python, typing.get_args(p))))
        return " \\| ".join(dict.fromkeys(describe_type(part) for part in parts))
    if origin in (list, tuple, set, frozenset):
        return f"list of {describe_type(parts[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if origin is not None and "Callable" in str(origin):
        return "function"
    if find_option_class(annotation):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, str):
        return "str"
    return {"Path": "str", "SecretStr": "str"}.get(annotation.__name__, annotation.__name__)


def _is_for_python(item: object) -> bool:
    """Return whether metadata states that a run file cannot contain the type."""
    return type(item) is SkipJsonSchema


def list_known_names(field: FieldInfo) -> str:
    """Return the allowed names of a field from the error of its validator, or an empty list."""
    key = (str(field.annotation), *map(id, field.metadata))
    if key not in _KNOWN:
        _KNOWN[key] = _known_names(field)
    return _KNOWN[key]


#: Allowed names by type and validators, which classes share with their base classes.
_KNOWN: dict[tuple[object, ...], str] = {}


def _known_names(field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is Literal:
        return ""  # its type lists them
    try:
        annotated: Any = Annotated
        TypeAdapter(annotated[(field.annotation, *field.metadata)]).validate_python("?")
    except ValidationError as error:
        names = (problem.get("ctx", {}).get("known") for problem in error.errors())
        return next((str(listed) for listed in names if listed), "")
    except Exception:  # other kinds of fields have no list of names
        return ""
    return ""


def describe_default(field: FieldInfo) -> str:
    """Return the default as YAML, or `required`."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, dict) and value:
        return "see below"
    return f"`{yaml_text(value)}`"


def yaml_text(value: object) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(yaml_text(item) for item in value)}]"
    return json.dumps(getattr(value, "value", value), default=str)
