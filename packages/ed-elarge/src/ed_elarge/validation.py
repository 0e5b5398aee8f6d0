"""Check one mapping against one options class, and find everything that is wrong with it."""

from __future__ import annotations

import copy
import functools
import typing
from typing import Any

import pydantic

from ed_elarge.errors import KeyPath, Problem, from_pydantic, keys_to_drop


def validate(
    cls: type[pydantic.BaseModel], value: Any, path: KeyPath, *, partial: bool = False
) -> tuple[Any | None, list[Problem]]:
    """Build `cls` from `value`; `partial` says that missing keys may still come.

    An unknown key stops pydantic before it looks at the values, so such keys are reported, taken
    out, and the rest is checked again: a file shows all its errors at once.

    Returns:
        `(instance, [])`, or `(None, problems)`.
    """
    value = {} if value is None else value
    problems: list[Problem] = []
    rest = value
    while True:
        try:
            instance = cls.model_validate(rest)
        except pydantic.ValidationError as error:
            found = from_pydantic(error, path, value, spellings(cls), partial=partial)
            problems.extend(problem for problem in found if problem not in problems)
            drop = keys_to_drop(error)
            if not drop:
                return None, problems
            rest, before = _without(rest, drop), rest
            if rest == before:
                return None, problems
        else:
            return (None, problems) if problems else (instance, [])


def _without(value: Any, paths: list[KeyPath]) -> Any:
    value = copy.deepcopy(value)
    for path in paths:
        holder = value
        for part in path[:-1]:
            # parts that pydantic made up (the tag of a union) are not in the value
            if (isinstance(holder, dict) and part in holder) or (
                isinstance(holder, (list, tuple)) and isinstance(part, int) and part < len(holder)
            ):
                holder = holder[part]
        if isinstance(holder, dict):
            by_text = {str(key): key for key in holder}
            holder.pop(by_text.get(str(path[-1])), None)
    return value


@functools.cache
def spellings(cls: type[pydantic.BaseModel]) -> dict[str, list[str]]:
    """Canonical key -> other spellings, for a class and the classes nested in it."""
    out: dict[str, list[str]] = {}
    for other, name in getattr(cls, "ALIASES", {}).items():
        out.setdefault(name, []).append(other)
    for field in cls.model_fields.values():
        for nested in _models(field.annotation):
            for name, others in spellings(nested).items():
                out.setdefault(name, []).extend(others)
    return out


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]
