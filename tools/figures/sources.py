"""Figures of source files: lines, annotations, public names, and modules that an import loads."""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

IGNORED = "type: ignore"
FAMILY = "ed_models.families.llama"
HEADER = ["", "files", "lines", "code", "median", "p90", "< 60", ": Any", "type: ignore", "llama"]
_DEFINED = re.compile(r"^(?:class )?([A-Z]\w*)(?=[(:]| =)", re.MULTILINE)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass(frozen=True)
class Source:
    """Figures of one source file.

    Attributes:
        lines: Number of lines.
        code: Number of lines without blank lines, comments and docstrings.
        any: Number of annotations `: Any`.
        ignored: Number of comments `type: ignore`.
    """

    lines: int
    code: int
    any: int
    ignored: int

    @classmethod
    def of(cls, text: str) -> Source:
        """Measure the text of a Python file."""
        return cls(
            lines=len(text.splitlines()),
            code=len(code_lines(text)),
            any=count_any(text),
            ignored=text.count(IGNORED),
        )


def count_any(text: str) -> int:
    """Return the number of annotations `: Any`."""
    return len(re.findall(r": Any\b", text))


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines with code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return lines - docstring_lines(text)


def docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines of docstrings, including those of attributes."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def definitions(text: str) -> dict[str, str]:
    """Return the public classes and type aliases of a module: name -> definition."""
    names = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = ast.unparse(node.value)
    return {name: text for name, text in names.items() if re.match(r"[A-Z]\w*[a-z]", name)}


def several_meanings(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that modules define in different ways: name -> modules.

    Args:
        modules: Name of each module -> its text.
    """
    counts = Counter(name for text in modules.values() for name in set(_DEFINED.findall(text)))
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for module, text in modules.items():
        if any(counts[name] > 1 for name in _DEFINED.findall(text)):
            for name, definition in definitions(text).items():
                places[name][module] = definition
    return {name: sorted(of) for name, of in sorted(places.items()) if len({*of.values()}) > 1}


def imported_by(module: str) -> Counter[str]:
    """Import a module in a new process, and count the loaded modules of each package.

    `__init__.py` files contain no code and do not count.
    """
    loaded = "(n for n, m in sys.modules.items() if not hasattr(m, '__path__'))"
    code = f"import sys, {module}; print(*{loaded})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Counter(name.split(".")[0] for name in done.stdout.split())


def row(name: str, sources: Iterable[Source], imported: int) -> list[str]:
    """Return the cells of a package, or of all packages."""
    sources = list(sources)
    lengths = sorted(source.lines for source in sources)
    figures = [
        len(lengths),
        sum(lengths),
        sum(source.code for source in sources),
        statistics.median(lengths),
        lengths[int(0.9 * len(lengths))],
        sum(length < 60 for length in lengths),
        sum(source.any for source in sources),
        sum(source.ignored for source in sources),
        imported,
    ]
    return [name, *(f"{figure:,.0f}" for figure in figures)]


def texts(folder: Path) -> dict[str, str]:
    """Return the texts of the modules in a folder by dotted name."""
    files = sorted(folder.rglob("*.py"))
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts): file.read_text(encoding="utf-8")
        for file in files
    }
