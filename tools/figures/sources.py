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
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.check_workspace import COPIES

IGNORED = "type: ignore"
FAMILY = "ed_models.families.llama"
HEADER = ["", "files", "lines", "code", "median", "p90", "< 60", ": Any", "type: ignore", "llama"]
_DEFINED = re.compile(r"^(?:class )?([A-Z]\w*)(?=[(:]| =)", re.MULTILINE)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


#: Names of the logger of a module.
LOGGERS = {"log", "logger"}
#: Options of the server whose names also are fields of requests, machines and tokenizers.
OTHER_MEANINGS = {"chat_template", "host", "keep_alive", "limits", "port"}
#: Place with the name of an option of the server -> what it declares.
OTHER_DECLARATIONS = {
    "ed_esurge.command.bench_serve:ArrivalOptions": "the model of the requests of a load test",
    "ed_esurge.command.run_batch:BatchOptions": "the model of the requests of a file",
    "ed_models.base.methods:generate": "options of one call without a server",
    "ed_esurge.server.generation.prompts:__init__": "an argument of a class without a server",
    "ed_esurge.server.generation.reply_formats:__init__": "an argument of a class without a server",
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


def list_repeated_names(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return the public functions, classes and constants that several modules define.

    Loggers, type variables and vendored copies do not count.

    Args:
        modules: Name of each module -> its text.

    Returns:
        Name -> the modules that define the name.
    """
    copies = {path.split("/src/")[1].removesuffix(".py").replace("/", ".") for path in COPIES}
    places: dict[str, list[str]] = defaultdict(list)
    for module, text in modules.items():
        if module not in copies:
            for name in dict.fromkeys(_list_module_names(text)):
                places[name].append(module)
    return {name: of for name, of in sorted(places.items()) if len(of) > 1}


def _list_module_names(text: str) -> list[str]:
    names: list[str] = []
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Assign(value=ast.Call(func=ast.Name("TypeVar"))):
                pass
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_") and name not in LOGGERS]


def list_declarations(modules: dict[str, str], names: Collection[str]) -> dict[str, list[str]]:
    """Return name -> the places that declare an option with this name.

    A declaration is a field of a class, a flag of a parser, or a parameter with a default.

    Args:
        modules: Name of each module -> its text.
        names: Names of options.
    """
    places: dict[str, list[str]] = {name: [] for name in names}
    for module, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            for name in _list_declared_names(node):
                if name in places:
                    places[name].append(f"{module}:{getattr(node, 'name', 'flag')}")
    return places


def list_server_declarations(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return option of the server -> the places that declare it, without `OTHER_DECLARATIONS`."""
    from ed_esurge.server.options import ServerOptions

    names = ServerOptions.model_fields.keys() - OTHER_MEANINGS
    declarations = list_declarations(modules, names)
    return {
        name: [place for place in places if place not in OTHER_DECLARATIONS]
        for name, places in declarations.items()
    }


def _list_declared_names(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef():
            fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
            return [ast.unparse(field.target) for field in fields]
        case ast.Call(func=ast.Attribute(attr="add_argument" | "Option")):
            words = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            flags = (word for word in words if isinstance(word, str) and word.startswith("--"))
            return [flag.partition("/")[0][2:].replace("-", "_") for flag in flags]
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            positional = [*arguments.posonlyargs, *arguments.args]
            optional = positional[len(positional) - len(arguments.defaults) :]
            keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            optional += [argument for argument, default in keyword if default is not None]
            return [argument.arg for argument in optional]
    return []


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
