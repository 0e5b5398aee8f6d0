"""Input errors with their location: `file:line:column`, the line, and a caret."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ed_infra.errors import ConfigError, shorten_message

#: Keys and list positions, from the top of a file inwards.
ValuePath = tuple[Any, ...]


class Span(NamedTuple):
    """A part of one line. Lines and columns start at zero, and `end` is exclusive."""

    line: int
    column: int
    end: int


@dataclass
class Document:
    """The values of a file with their locations.

    Attributes:
        name: Name in error messages: the path as the user typed it.
        text: Text of the file; empty for a configuration from Python.
        value: Plain Python values (dict, list, str, int, float, bool, None).
        keys: Path of a value -> location of its key.
        values: Path of a value -> location of the value.
        owners: Path -> the document of its location, for values of an included file or of the
            command line. Paths without an owner are of this document.
    """

    name: str
    text: str = ""
    value: Any = None
    keys: dict[ValuePath, Span] = field(default_factory=dict)
    values: dict[ValuePath, Span] = field(default_factory=dict)
    owners: dict[ValuePath, Document] = field(default_factory=dict)

    def owner(self, path: ValuePath) -> Document:
        """Return the document that has the location of `path`."""
        while path and path not in self.owners and path not in self.values:
            path = path[:-1]
        return self.owners.get(path, self)

    def span(self, path: ValuePath, *, on_key: bool) -> Span | None:
        """Return the location of `path` or of its nearest ancestor; None without text."""
        while path and path not in self.values:
            path, on_key = path[:-1], True
        if on_key and path in self.keys:
            return self.keys[path]
        return self.values.get(path)

    def line(self, number: int) -> str:
        """Return one line of the text, without its line break."""
        lines = self.text.splitlines()
        return lines[number] if number < len(lines) else ""

    def show(self, problem: Problem) -> str:
        """Format a problem: location, message, line and caret."""
        owner = self.owner(problem.path)
        if owner is not self:
            return owner.show(problem)
        path_text = format_path(problem.path)
        message = shorten_message(problem.message, _MAX_PROBLEM)
        message = f"{path_text}: {message}" if path_text else message
        span = self.span(problem.path, on_key=problem.on_key) if self.text else None
        if span is None:
            return f"{self.name}: {message}"
        number = str(span.line + 1)
        text = self.line(span.line)
        if len(text) > _MAX_LINE:
            return f"{self.name}:{number}:{span.column + 1}: {message}"
        # The caret line repeats tabs, so that the caret is below the value at every tab width.
        indent = "".join(c if c == "\t" else " " for c in text[: span.column])
        caret = "^" * max(1, min(span.end, len(text)) - span.column)
        return (
            f"{self.name}:{number}:{span.column + 1}: {message}\n"
            f"  {number} | {text}\n"
            f"  {' ' * len(number)} | {indent}{caret}"
        )

    def sort_key(self, problem: Problem) -> tuple[int, int]:
        """Return the line and column of a problem; problems without location sort last."""
        owner = self.owner(problem.path)
        if owner is not self:
            return owner.sort_key(problem)
        span = self.span(problem.path, on_key=problem.on_key)
        return (span.line, span.column) if span else (1 << 30, 0)


class Problem(NamedTuple):
    """An error or a warning about one value.

    Attributes:
        path: Keys and list positions from the top of the file.
        message: The value, the constraint and a solution.
        on_key: Whether the location is the key instead of its value.
    """

    path: ValuePath
    message: str
    on_key: bool = False


#: Maximum number of problems in the message of an error.
MAX_SHOWN = 64
#: Maximum characters of a problem, which may quote a value of any length.
_MAX_PROBLEM = 2048
#: Maximum characters of a line of a file in a message.
_MAX_LINE = 400


class InputError(ConfigError):
    """All problems of one file or mapping, in the order of the file.

    Attributes:
        document: The file or mapping.
        problems: The problems, in order.
    """

    def __init__(self, document: Document | str, problems: Sequence[Problem]) -> None:
        self.document = document if isinstance(document, Document) else Document(document)
        self.problems = sorted(problems, key=self.document.sort_key)
        parts = [self.document.show(problem) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            parts.append(f"the other {len(self.problems) - MAX_SHOWN} errors are not shown")
        if len(parts) > 1:
            parts.append(f"{len(self.problems)} errors in {self.document.name}")
        super().__init__("\n".join(parts))


def format_path(path: Iterable[Any]) -> str:
    """Format a path: `("mixture", "informs", 0, "type")` becomes `mixture.informs[0].type`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
