"""What is wrong with an input, said once and in place: `file:line:column`, the line, a caret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic
from ed_infra.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from ed_elarge.nodes import Document

KeyPath = tuple[Any, ...]


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        path: keys and list positions from the top of the file.
        message: the value, the constraint and the way out.
        on_key: point at the key itself rather than at its value.
    """

    path: KeyPath
    message: str
    on_key: bool = False


class InputError(ConfigError):
    """All the problems of one file (or of one dict), in the order in which they stand there.

    Attributes:
        name: the file's name, or what the input is called.
        problems: every problem found.
        document: the text they refer to, where there is one.
    """

    def __init__(
        self, name: str, problems: Sequence[Problem], document: Document | None = None
    ) -> None:
        self.name = name
        self.document = document
        self.problems = sorted(problems, key=self._order) if document else list(problems)
        super().__init__(self._render())

    def _order(self, problem: Problem) -> tuple[int, int]:
        assert self.document is not None
        span = self.document.span(problem.path, on_key=problem.on_key)
        return (span.line, span.column) if span else (1 << 30, 0)

    def _render(self) -> str:
        parts = [self._render_one(problem) for problem in self.problems]
        if len(parts) > 1:
            parts.append(f"{len(parts)} errors in {self.name}")
        return "\n".join(parts)

    def _render_one(self, problem: Problem) -> str:
        where = dotted(problem.path)
        message = f"{where}: {problem.message}" if where else problem.message
        span = self.document and self.document.span(problem.path, on_key=problem.on_key)
        if not self.document or not span:
            return f"{self.name}: {message}"
        number = str(span.line + 1)
        text = self.document.line(span.line)
        # a tab is one character of the text and one of the caret line, whatever its width
        indent = "".join(c if c == "\t" else " " for c in text[: span.column])
        caret = "^" * max(1, min(span.end, len(text)) - span.column)
        return (
            f"{self.name}:{number}:{span.column + 1}: {message}\n"
            f"  {number} | {text}\n"
            f"  {' ' * len(number)} | {indent}{caret}"
        )


def dotted(path: Iterable[Any]) -> str:
    """`("mixture", "informs", 0, "type")` -> `mixture.informs[0].type`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out


def from_pydantic(
    error: pydantic.ValidationError,
    prefix: KeyPath,
    value: Any,
    aliases: dict[str, list[str]],
    *,
    partial: bool = False,
) -> list[Problem]:
    """Translate pydantic's errors into problems of the file.

    Args:
        error: what validation raised.
        prefix: where the validated value stands in the file.
        value: the validated value as the user gave it.
        aliases: canonical key -> other spellings, to find the key that the user really typed.
        partial: leave out what is missing.
    """
    problems = []
    items = error.errors(include_url=False)
    for item in items:
        length = len(item["loc"])
        if item["type"] == "too_short" and any(
            len(other["loc"]) > length and other["loc"][:length] == item["loc"] for other in items
        ):
            continue  # too short only because its wrong items were not counted
        if partial and item["type"] == "missing":
            continue
        path = _user_path(item["loc"], value, aliases)
        kind = item["type"]
        if kind == "missing":
            path = path[:-1] if path and path[-1] == item["loc"][-1] else path
        on_key = kind in ("missing", *_ABOUT_THE_KEY)
        problem = Problem((*prefix, *path), _words(item), on_key)
        if problem not in problems:
            problems.append(problem)
    return problems


#: Kinds of pydantic errors that are about a key and not about its value.
_ABOUT_THE_KEY = ("unknown_key", "duplicate_key", "extra_forbidden")


def keys_to_drop(error: pydantic.ValidationError) -> list[KeyPath]:
    """Paths of the keys that hide the section's other errors: validation stops at them."""
    return [tuple(i["loc"]) for i in error.errors(include_url=False) if i["type"] in _ABOUT_THE_KEY]


def _words(item: Any) -> str:
    """pydantic's message in the words of this project."""
    kind, message, given = item["type"], item["msg"], item["input"]
    if kind == "missing":
        return f"the key {str(item['loc'][-1])!r} is missing"
    if kind == "extra_forbidden":
        return f"unknown key {str(item['loc'][-1])!r}"
    if kind == "value_error":
        return str(item.get("ctx", {}).get("error", message))
    if kind.startswith(("model_", "dict_")):
        return f"must be a mapping of keys to values, got {_short(given)}"
    if not message.startswith("Input should be"):
        return message  # written by this project: it says all there is to say
    message = f"{message.replace('Input should be', 'must be')}, got {_short(given)}"
    if kind in ("literal_error", "enum") and isinstance(given, str):
        expected = str(item["ctx"]["expected"]).replace(" or ", ", ")
        message += did_you_mean(given, [word.strip("'") for word in expected.split(", ")])
    return message


def _user_path(loc: Sequence[Any], value: Any, aliases: dict[str, list[str]]) -> KeyPath:
    """Follow `loc` through what the user wrote; parts that pydantic made up are left out."""
    path: list[Any] = []
    for part in loc:
        if isinstance(value, dict):
            typed = next((k for k in (part, *aliases.get(str(part), ())) if k in value), None)
            if typed is None:
                if part is loc[-1]:
                    path.append(part)
                continue
            value = value[typed]
            path.append(typed)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            value = value[part]
            path.append(part)
    return tuple(path)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
