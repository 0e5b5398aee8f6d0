"""Print figures of the source code: files, lines, types, names, and imports of a model family.

uv run python -m tools.figures            a table with a row for each package
uv run python -m tools.figures --names    also the public names with several meanings
"""

from __future__ import annotations

import argparse
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

from tools.bench.measure import table
from tools.workspace import packages

FAMILY = "ed_models.families.llama"
HEADER = ["", "files", "lines", "code", "median", "p90", "< 60", ": Any", "type: ignore", "llama"]
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
            any=len(re.findall(r": Any\b", text)),
            ignored=text.count("type: ignore"),
        )


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines with code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return found - docstring_lines(text)


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
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return {name: text for name, text in found.items() if re.match(r"[A-Z]\w*[a-z]", name)}


def several_meanings(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that modules define in different ways: name -> modules.

    Args:
        modules: Name of each module -> its text.
    """
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for module, text in modules.items():
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


def main() -> None:
    """Print the table and the number of names with several meanings."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--names", action="store_true", help="list the names")
    options = parser.parse_args()
    by_package = {package: texts(package.folder / "src") for package in packages()}
    imported = imported_by(FAMILY)
    rows, everything = [], []
    for package, modules in by_package.items():
        sources = [Source.of(text) for text in modules.values()]
        everything += sources
        rows.append(row(package.name, sources, sum(imported[name] for name in package.modules)))
    rows.append(row("all", everything, sum(int(cells[-1]) for cells in rows)))
    print(table(HEADER, rows))
    print(
        f"\nThe last column is the number of modules that `import {FAMILY}` loads,\n"
        "without `__init__.py` files."
    )
    own = {m: text for of in by_package.values() for m, text in of.items() if m.startswith("ed_")}
    names = several_meanings(own)
    print(f"{len(names)} public names have definitions that differ between modules.")
    for name, modules in names.items() if options.names else ():
        print(f"  {name}: {', '.join(modules)}")


if __name__ == "__main__":
    main()
