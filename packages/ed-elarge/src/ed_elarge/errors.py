"""A mistake in an input, told once and in place: `file:line:column`, the line, a caret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ed_infra.errors import ConfigError

#: Keys and list positions, from the top of a file inwards.
KeyPath = tuple[Any, ...]


class Span(NamedTuple):
    """A piece of one line, counted from zero; `end` is exclusive."""

    line: int
    column: int
    end: int


@dataclass
class Document:
    """What a file says and where it says it.

    Attributes:
        name: what error messages call it: the path as the user typed it.
        text: the file's text; empty where the configuration is a Python value.
        value: plain Python values (dict, list, str, int, float, bool, None).
        keys: path of a value -> where its key stands.
        values: path of a value -> where the value stands.
    """

    name: str
    text: str = ""
    value: Any = None
    keys: dict[KeyPath, Span] = field(default_factory=dict)
    values: dict[KeyPath, Span] = field(default_factory=dict)

    def span(self, path: KeyPath, *, on_key: bool) -> Span | None:
        """The place of `path`, or of its nearest ancestor that the file has; None without text."""
        while path and path not in self.values:
            path, on_key = path[:-1], True
        if on_key and path in self.keys:
            return self.keys[path]
        return self.values.get(path)

    def line(self, number: int) -> str:
        """One line of the text, without its end."""
        lines = self.text.splitlines()
        return lines[number] if number < len(lines) else ""

    def show(self, problem: Problem) -> str:
        """A problem as text: its place, its message, the line and a caret."""
        where = dotted(problem.path)
        message = f"{where}: {problem.message}" if where else problem.message
        span = self.span(problem.path, on_key=problem.on_key) if self.text else None
        if span is None:
            return f"{self.name}: {message}"
        number = str(span.line + 1)
        text = self.line(span.line)
        # a tab is one character of the text and one of the caret line, whatever its width
        indent = "".join(c if c == "\t" else " " for c in text[: span.column])
        caret = "^" * max(1, min(span.end, len(text)) - span.column)
        return (
            f"{self.name}:{number}:{span.column + 1}: {message}\n"
            f"  {number} | {text}\n"
            f"  {' ' * len(number)} | {indent}{caret}"
        )

    def sort_key(self, problem: Problem) -> tuple[int, int]:
        """Orders problems as they stand in the text; those without a place come last."""
        span = self.span(problem.path, on_key=problem.on_key)
        return (span.line, span.column) if span else (1 << 30, 0)


class Problem(NamedTuple):
    """One mistake, or one thing to warn of.

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
        document: what the problems are about.
        problems: every problem, in order.
    """

    def __init__(self, document: Document | str, problems: Sequence[Problem]) -> None:
        self.document = document if isinstance(document, Document) else Document(document)
        self.problems = sorted(problems, key=self.document.sort_key)
        parts = [self.document.show(problem) for problem in self.problems]
        if len(parts) > 1:
            parts.append(f"{len(parts)} errors in {self.document.name}")
        super().__init__("\n".join(parts))


def dotted(path: Iterable[Any]) -> str:
    """`("mixture", "informs", 0, "type")` -> `mixture.informs[0].type`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
