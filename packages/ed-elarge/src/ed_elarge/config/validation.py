"""Validation of a mapping against an option class, with the location of each problem."""

from __future__ import annotations

import copy
import difflib
import functools
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from ed_infra.errors import did_you_mean
from pydantic_core import ErrorDetails

from ed_elarge.errors import Problem, ValuePath

T = TypeVar("T", bound=pydantic.BaseModel)

#: Kinds of pydantic errors about a key instead of its value.
_ABOUT_THE_KEY = ("unknown_key", "duplicate_key", "extra_forbidden")


def validate_values(
    cls: type[T], value: object, path: ValuePath, *, partial: bool = False
) -> tuple[T | None, list[Problem]]:
    """Validate `value` with `cls`; with `partial`, missing keys are no problem.

    pydantic does not validate values if a key is unknown. Unknown keys are therefore reported and
    removed, and the remaining keys are validated again, so that all problems are reported together.

    Returns:
        `(instance, [])`, or `(None, problems)`.
    """
    value = {} if value is None else value
    problems: list[Problem] = []
    remaining_value, misspelled = value, list[ValuePath]()
    while True:
        try:
            instance = cls.model_validate(remaining_value)
        except pydantic.ValidationError as error:
            items = error.errors(include_url=False)
            drop = [item["loc"] for item in items if item["type"] in _ABOUT_THE_KEY]
            misspelled += drop
            remaining_errors = [i for i in items if not _follows(i, misspelled)]
            remaining_errors = [
                i for i in remaining_errors if not (partial and i["type"] == "missing")
            ]
            for problem in _problems(remaining_errors, value, cls):
                problem = problem._replace(path=(*path, *problem.path))
                if problem not in problems:
                    problems.append(problem)
            remaining_value, previous_value = _without(remaining_value, drop), remaining_value
            if not drop or remaining_value == previous_value:
                return None, problems
        else:
            return (None, problems) if problems else (instance, [])


def _follows(item: ErrorDetails, misspelled: Sequence[ValuePath]) -> bool:
    """Return whether an error only results from a misspelled key, which is already reported."""
    for *holder, key in misspelled:
        if item["type"] == "too_short" and tuple(holder[: len(item["loc"])]) == item["loc"]:
            return True  # misspelled items were not counted
        if item["type"] == "missing" and item["loc"][:-1] == tuple(holder):
            return True
        if item["type"] == "value_error" and item["loc"] == tuple(holder):
            return True
        ours = item["type"] not in _ABOUT_THE_KEY and not item["msg"].startswith("Input should")
        if ours and item["loc"][:-1] == tuple(holder):
            words = re.findall(r"\w+", item["msg"])
            if difflib.get_close_matches(str(key).lower(), words, n=1):
                return True
    return False


def _without(value: object, paths: Sequence[ValuePath]) -> Any:
    """Return a copy of `value` without the keys at `paths`."""
    value = copy.deepcopy(value)
    for path in paths:
        holder = value
        for part in path[:-1]:
            # The tag of a union is part of pydantic's path, but not of the value.
            if (isinstance(holder, dict) and part in holder) or (
                isinstance(holder, (list, tuple)) and isinstance(part, int) and part < len(holder)
            ):
                holder = holder[part]
        if isinstance(holder, dict):
            by_text = {str(key): key for key in holder}
            holder.pop(by_text.get(str(path[-1])), None)
    return value


def _problems(items: Sequence[Any], value: object, cls: type[pydantic.BaseModel]) -> list[Problem]:
    """Translate pydantic's errors; paths start at `value`."""
    problems: list[Problem] = []
    for item in items:
        loc, kind = item["loc"], item["type"]
        if kind == "too_short" and any(
            len(inner_item["loc"]) > len(loc) and inner_item["loc"][: len(loc)] == loc
            for inner_item in items
        ):
            continue  # invalid items were not counted
        path, message = typed_path(loc, value, cls), _words(item)
        if kind == "value_error":
            path += _find_key(message, value_at(value, path), cls)
        inside = value_at(value, path)
        if isinstance(inside, Mapping) and kind not in ("missing", *_ABOUT_THE_KEY):
            path += tuple(k for k in inside if f"{k!r}" in message)[:1]
        problems.append(Problem(path, message, kind in ("missing", *_ABOUT_THE_KEY)))
    return _one_for_each_place(problems)


def _one_for_each_place(problems: list[Problem]) -> list[Problem]:
    """Merge the messages of a union's alternatives about one value into one sentence."""
    by_place: dict[ValuePath, list[Problem]] = {}
    for problem in problems:
        place_problems = by_place.setdefault(problem.path, [])
        if problem not in place_problems:
            place_problems.append(problem)
    out = []
    for group in by_place.values():
        parts = [problem.message.partition(", got ") for problem in group]
        if len(group) > 1 and all(head.startswith("must be ") for head, _, _ in parts):
            heads = [head.removeprefix("must be ") for head, _, _ in parts]
            message = f"must be {' or '.join(dict.fromkeys(heads))}, got {parts[0][2]}"
            group = [Problem(group[0].path, message, group[0].on_key)]
        out.extend(group)
    return out


def _words(item: ErrorDetails) -> str:
    """Return pydantic's message in the style of this project."""
    kind, message, value = item["type"], item["msg"], item["input"]
    if kind == "missing":
        return f"the key {str(item['loc'][-1])!r} is missing"
    if kind == "extra_forbidden":
        return f"unknown key {str(item['loc'][-1])!r}"
    if kind == "value_error":
        return str(item.get("ctx", {}).get("error", message))
    if kind.startswith(("model_", "dict_")):
        return f"must be a mapping of keys to values, got {_short(value)}"
    if not message.startswith("Input should be"):
        return message  # a complete message of this project
    message = message.replace("Input should be", "must be").replace("a valid tuple", "a list")
    message = f"{message}, got {_short(value)}"
    if kind in ("literal_error", "enum") and isinstance(value, str):
        expected = str(item.get("ctx", {})["expected"]).replace(" or ", ", ")
        message += did_you_mean(value, [word.strip("'") for word in expected.split(", ")])
    return message


def _find_key(message: str, value: object, cls: type[pydantic.BaseModel]) -> ValuePath:
    """Return the path of the key that a message mentions, or an empty path.

    A validator of a whole class reports no location, but its message names keys. Of the named keys
    that the user wrote, the empty one is selected, or one whose value the message repeats, or the
    first.
    """
    named = []
    for words in re.findall(r"[a-z]\w*(?:\.[a-z]\w*)*", message):
        path = typed_path(words.split("."), value, cls)
        if len(path) == words.count(".") + 1:
            named.append(path)
    empty = (path for path in named if value_at(value, path) in (None, [], {}, ""))
    quoted_paths = (path for path in named if repr(value_at(value, path)) in message)
    return next(empty, None) or next(quoted_paths, None) or next(iter(named), ())


#: Keys whose text may be empty, and mappings with keys of other programs.
_MAY_BE_EMPTY = {
    *("system_instruction", "content", "prompts", "prompt", "generation_prompts", "chat_template"),
    *("config", "values", "operation_configs", "gen_kwargs", "optimizer_kwargs"),
}


def empty_texts(value: object, path: ValuePath) -> list[Problem]:
    """Return a problem for each empty text: a name or a path needs at least one character."""
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if key not in _MAY_BE_EMPTY]
    elif isinstance(value, (list, tuple)):
        items = [*enumerate(value)]
    elif isinstance(value, str) and not value.strip():
        return [Problem(path, "is an empty text: write a value, or omit the key")]
    else:
        return []
    return [problem for key, item in items for problem in empty_texts(item, (*path, key))]


def value_at(value: Any, path: ValuePath) -> Any:
    """Return the value at `path`, or None."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def typed_path(
    loc: Sequence[Any], value: object, cls: type[pydantic.BaseModel] | None
) -> ValuePath:
    """Convert canonical keys to the user's spelling in `value`; missing parts are omitted."""
    aliases = spellings(cls) if cls is not None else {}
    path: list[Any] = []
    for part in loc:
        if isinstance(value, Mapping):
            typed = next((k for k in (part, *aliases.get(str(part), ())) if k in value), None)
            if typed is None:
                continue
            value = value[typed]
            path.append(typed)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            value = value[part]
            path.append(part)
    return tuple(path)


@functools.cache
def spellings(cls: type[pydantic.BaseModel]) -> dict[str, list[str]]:
    """Return canonical key -> other spellings, for a class and its nested classes."""
    out: dict[str, list[str]] = {}
    for alias, name in getattr(cls, "ALIASES", {}).items():
        out.setdefault(name, []).append(alias)
    for field in cls.model_fields.values():
        for nested in _models(field.annotation):
            for name, aliases in spellings(nested).items():
                out.setdefault(name, []).extend(aliases)
    return out


def _models(annotation: object) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
