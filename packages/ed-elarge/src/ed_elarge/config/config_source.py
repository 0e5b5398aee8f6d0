"""Fields of Hugging Face configuration classes, read from the source of transformers.

Importing transformers needs seconds, and parsing the file of one configuration class milliseconds.
`--dry-run` therefore checks `model.config` quickly, against the installed version of transformers.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_NAMES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "None": "null",
    "list": "list",
    "dict": "mapping",
    "Literal": "string",
    "RopeParameters": "mapping",
}


class ConfigField(NamedTuple):
    """A field of a configuration class.

    Attributes:
        types: JSON types of its values (keys of `ed_elarge.config.architectures`).
        default: the default value; None if it is computed.
    """

    types: tuple[str, ...]
    default: Any


#: Largest length of the name of a model type.
_MAX_NAME = 100


@functools.cache
def config_fields(model_type: str) -> dict[str, ConfigField] | None:
    """Return the fields of a model type's configuration class, or None if transformers has none."""
    definition = _find_class(model_type)
    return None if definition is None else _fields(*definition)


@functools.cache
def inner_types(model_type: str) -> dict[str, str]:
    """Return the keys of configurations inside a configuration, with their model types."""
    definition = _find_class(model_type)
    if definition is None:
        return {}
    file, tree, node = definition
    out: dict[str, str] = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys, values)) if name in (
                "sub_configs",
                "sub_configs_defaults",
            ):
                for key, value in zip(keys, values, strict=True):
                    kind = _inner_type(file, tree, value)
                    if key is not None and kind is not None:
                        out[str(ast.literal_eval(key))] = kind
    return out


def _inner_type(file: Path, tree: ast.Module, value: ast.expr) -> str | None:
    """Return the model type of a class, or of `SubConfigSpec(config_class=…, model_type="…")`."""
    if isinstance(value, ast.Call):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(kind := named.get("model_type"), ast.Constant):
            return str(kind.value)
        value = named.get("config_class", value)
    definition = next(_definitions(file, tree, ast.unparse(value)), None)
    return None if definition is None else _model_type(definition[2])


def _find_class(model_type: str) -> tuple[Path, ast.Module, ast.ClassDef] | None:
    file = _file(model_type)
    if file is None:
        return None
    tree = _parse(file)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _model_type(node) == model_type:
            return file, tree, node
    return None


def _file(model_type: str) -> Path | None:
    """Return the file that contains the configuration class; `gemma3_text` is in `gemma3`."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    models = Path(spec.submodule_search_locations[0]) / "models"
    folder = re.sub(r"[^A-Za-z0-9]", "_", model_type)
    while folder and len(folder) <= _MAX_NAME:
        file = models / folder / f"configuration_{folder}.py"
        if file.is_file():
            return file
        folder = folder.rpartition("_")[0]
    return None


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def _model_type(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "model_type":
            return str(ast.literal_eval(statement.value))
    return None


def _fields(file: Path, tree: ast.Module, node: ast.ClassDef) -> dict[str, ConfigField]:
    """Return the annotated attributes of a class and of its bases, as a dataclass has them."""
    out: dict[str, ConfigField] = {}
    for base in reversed(node.bases):
        for definition in _definitions(file, tree, ast.unparse(base)):
            out |= _fields(*definition)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            types = tuple(sorted(set(_types(statement.annotation))))
            if types != ("classvar",):
                out[statement.target.id] = ConfigField(types, _default(statement.value))
    out.pop("transformers_version", None)
    return out


def _definitions(
    file: Path, tree: ast.Module, name: str
) -> Iterator[tuple[Path, ast.Module, ast.ClassDef]]:
    """Find the definition of a base class in this file, or in the file that it is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield file, tree, node
        elif isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            folder = file.parents[max(node.level - 1, 0)]
            source = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if node.level and source.is_file():
                yield from _definitions(source, _parse(source), name)


def _types(annotation: ast.expr) -> Iterator[str]:
    """Yield the JSON types of an annotation; names without a JSON type are skipped."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from _types(left)
            yield from _types(right)
        case ast.Subscript(value=ast.Name(id="Union" | "Optional" as name), slice=inner):
            yield from ["null"] if name == "Optional" else []
            for part in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                yield from _types(part)
        case ast.Subscript(value=ast.Name(id="ClassVar")) | ast.Name(id="ClassVar"):
            yield "classvar"
        case ast.Subscript(value=value):
            yield from _types(value)
        case ast.Constant(value=str(text)):
            yield from _types(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            yield "null"
        case ast.Name(id=name) if name in _NAMES:
            yield _NAMES[name]


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # `interval(min=0.0)(default=0.02)`, `field(default=None)`
        value = next((k.value for k in value.keywords if k.arg == "default"), None)
    if value is None:
        return None
    try:
        return _constant(value)
    except ValueError:  # the class computes the default
        return None


def _constant(node: ast.expr) -> Any:
    """Return the value of a literal, of arithmetic such as `4096 * 32`, or of `float("inf")`."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_constant(left), _constant(right))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            return float(text)
        case ast.Tuple(elts=parts):
            return tuple(_constant(part) for part in parts)
        case _:
            return ast.literal_eval(node)
