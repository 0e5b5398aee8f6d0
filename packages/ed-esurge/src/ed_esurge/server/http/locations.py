"""Where a problem is in a body, in the words of the client that sent the body.

A location of pydantic mixes fields and positions of the body with names of its own: members of
unions, tags, validators. Only the former are in the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Part = str | int
# Fields whose name differs from a name that the body may use: the aliases of the request models.
_SPELLED: dict[Part, tuple[str, ...]] = {
    "json_schema": ("json_schema", "schema", "json"),
    "text_1": ("text_1", "queries", "data_1"),
    "text_2": ("text_2", "documents", "items", "data_2"),
}


def in_body(location: Sequence[Part], body: Any, *, missing: bool = False) -> list[Part]:
    """Return the parts of a location that are fields and positions of a body.

    Args:
        location: from an error of pydantic.
        body: the parsed JSON that was validated.
        missing: the last part is a field that the body lacks.
    """
    known, _ = _matched(tuple(location), body, missing)
    return known


def _matched(location: tuple[Part, ...], here: Any, missing: bool) -> tuple[list[Part], bool]:
    """The longest list of parts that is a path of the body, and whether the last part is in it."""
    if not location:
        return [], False
    head, rest = location[0], location[1:]
    if missing and not rest:
        return [head], True
    skipped = _matched(rest, here, missing)
    if isinstance(here, Mapping):
        head = next((name for name in _SPELLED.get(head, ()) if name in here), head)
        if head not in here:
            return skipped
        inner = here[head]
    elif isinstance(here, list) and isinstance(head, int) and head < len(here):
        inner = here[head]
    else:
        return skipped
    parts, last = _matched(rest, inner, missing)
    taken = [head, *parts], last or not rest
    return max(taken, skipped, key=lambda found: (len(found[0]), found[1]))


def spelled(parts: Sequence[Part]) -> str:
    """Write parts as a path: `messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def joined(path: str | None, field: str) -> str:
    """Append a field, or a position in brackets, to a path."""
    if path is None:
        return field
    return f"{path}{field}" if field.startswith("[") else f"{path}.{field}"
