"""Layers of a configuration: files of `include:`, and values of `--set` on the command line.

A later layer replaces values of an earlier one; mappings are merged key by key. Each value keeps
the location in its own file, so that an error names that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ed_elarge.config.local_paths import expand_path, is_file
from ed_elarge.errors import Document, InputError, Problem, Span, ValuePath

INCLUDE = "include"


def merge_documents(below: Document, above: Document) -> Document:
    """Return a document with the values of both; `above` has precedence.

    The result has the name and the text of `above`.
    """
    out = Document(above.name, above.text, keys=dict(above.keys), values=dict(above.values))
    out.owners = dict(above.owners)
    out.value = _merge_values(below.value, above.value)
    for path in {*below.values, *below.keys, *below.owners}:
        if path and path not in above.values and path not in above.owners and _has(out.value, path):
            out.owners.setdefault(path, below.owner(path))
    return out


def resolve_includes(document: Document, read: Callable[[Path], Document]) -> Document:
    """Return the document merged over the files of its key `include`.

    Args:
        document: A parsed file. The paths of `include` start at its folder.
        read: Reads a path to a document, whose own includes are resolved.

    Raises:
        InputError: The key is no path or list of paths, or a file cannot be read.
    """
    if not isinstance(document.value, Mapping) or INCLUDE not in document.value:
        return document
    value = document.value[INCLUDE]
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n for n in names):
        message = f"must be the path of a file, or a list of paths, got {value!r}"
        raise InputError(document, [Problem((INCLUDE,), message)])
    below: Document | None = None
    for name in names:
        path = Path(document.name).parent / expand_path(name)
        if not is_file(path):
            raise InputError(document, [Problem((INCLUDE,), f"no such file: {path}")])
        one = read(path)
        below = one if below is None else merge_documents(below, one)
    document_values = {key: item for key, item in document.value.items() if key != INCLUDE}
    document.value = document_values
    assert below is not None
    return merge_documents(below, document)


def with_settings(
    document: Document, settings: Sequence[str], parse: Callable[[str, str], Document]
) -> Document:
    """Return the document merged under the settings of a command line.

    Args:
        document: A run file.
        settings: Texts `path=value`, such as `trainer.learning_rate=1e-5`; the value is YAML. The
            path may contain the number of a list item: `mixture.informs.0.num_rows=10`.
        parse: Parses YAML text to a document.

    Raises:
        InputError: A text has another form, or a path leads through a plain value.
    """
    problems: list[Problem] = []
    for text in settings:
        name, sign, value = text.partition("=")
        keys = name.strip().split(".")
        if not sign or not all(keys):
            message = f"--set needs key=value, such as trainer.learning_rate=1e-5, got {text!r}"
            raise InputError("--set", [Problem((), message)])
        path, problem = _convert_keys(document.value, keys)
        if problem:
            problems.append(Problem((), f"--set {text}: {problem}"))
            continue
        layer = Document("--set", text)
        parsed = parse(value, f"--set {name}=")
        layer.value = _nest_value(path, parsed.value)
        start = len(name) + 1 + len(value) - len(value.lstrip())
        layer.keys = {path: Span(0, 0, len(name))}
        layer.values = {path: Span(0, start, max(start + 1, len(text)))}
        document = _set(document, path, parsed.value, layer)
    if problems:
        raise InputError("--set", problems)
    return document


def _set(document: Document, path: ValuePath, value: object, layer: Document) -> Document:
    """Return a document with one changed value, whose location is in `layer`."""
    out = Document(document.name, document.text, keys=dict(document.keys))
    out.value = replace_value(document.value, path, value)
    inside = lambda value_path: value_path[: len(path)] == path  # noqa: E731
    out.values = {k: v for k, v in document.values.items() if not inside(k)}
    out.keys = {k: v for k, v in document.keys.items() if not inside(k)}
    out.owners = {k: v for k, v in document.owners.items() if not inside(k)}
    out.owners[path] = layer
    return out


def _convert_keys(value: object, keys: Iterable[str]) -> tuple[ValuePath, str]:
    """Return the keys with numbers for list items, and a problem or an empty string."""
    path: list[Any] = []
    for key in keys:
        if isinstance(value, list):
            if not key.isdigit() or int(key) >= len(value):
                return (), f"{key!r} is no number of an item: the list has {len(value)} items"
            path.append(int(key))
            value = value[int(key)]
        elif value is None or isinstance(value, Mapping):
            path.append(key)
            value = value.get(key) if value is not None else None
        else:
            return (), f"{'.'.join(map(str, path))} is {value!r}, which has no keys"
    return tuple(path), ""


def replace_value(value: object, path: ValuePath, new: object) -> Any:
    """Return a copy of a document with one value set; missing mappings are created."""
    if not path:
        return new
    first, *inner_path = path
    if isinstance(value, list):
        return [
            replace_value(v, tuple(inner_path), new) if i == first else v
            for i, v in enumerate(value)
        ]
    old = value if isinstance(value, Mapping) else {}
    return {**old, first: replace_value(old.get(first), tuple(inner_path), new)}


def _nest_value(path: ValuePath, value: object) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _merge_values(below: object, above: object) -> Any:
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        keys = dict.fromkeys([*below, *above])
        return {
            key: _merge_values(below[key], above[key])
            if key in below and key in above
            else above.get(key, below.get(key))
            for key in keys
        }
    return above


def _has(value: Any, path: ValuePath) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def flatten_values(value: Mapping[Any, Any] | Sequence[Any], prefix: str = "") -> dict[str, Any]:
    """Return the plain values in nested mappings and lists by their dotted keys."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    out: dict[str, Any] = {}
    for key, item in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        nested = isinstance(item, Mapping | list | tuple) and item
        out.update(flatten_values(item, name) if nested else {name: item})
    return out
