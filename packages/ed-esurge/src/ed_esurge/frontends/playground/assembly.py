"""One HTML file from ES modules and style sheets, so that the page needs no build step and no path.

A module imports with `import { a, b } from "./file.js";` and exports declarations. The assembled
script contains each module once, as a function that returns the exported names. An imported name
keeps its value: a module shares changing state as the fields of an object.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[\w./-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(
    r"^export (?=(?:(?:async )?function\*? ?|class |const )([A-Za-z_$][\w$]*))", re.MULTILINE
)
_OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def assemble_page(text: str, folder: Traversable) -> str:
    """Return a page with the style sheets and the script that its placeholders name.

    Args:
        text: HTML with placeholders such as `{{style/base.css}}` and `{{script/main.js}}`.
        folder: the directory of the files.

    Raises:
        ValueError: a module imports a name that is not exported, or two modules import each other.
    """

    def content(match: re.Match[str]) -> str:
        name = match[1]
        return _script(folder, name) if name.endswith(".js") else _read(folder, name)

    return re.sub(r"\{\{([\w./-]+)\}\}", content, text)


def _read(folder: Traversable, name: str) -> str:
    return folder.joinpath(*name.split("/")).read_text("utf-8")


def _script(folder: Traversable, main: str) -> str:
    exports: dict[str, list[str]] = {}
    parts: list[str] = []
    active: list[str] = []

    def add(path: str) -> None:
        if path in exports:
            return
        if path in active:
            raise ValueError(f"modules import each other: {' -> '.join([*active, path])}")
        active.append(path)
        text = _read(folder, path)

        def replace_import(match: re.Match[str]) -> str:
            source = normpath(join(dirname(path), match[2]))
            add(source)
            names = [name.strip() for name in match[1].split(",") if name.strip()]
            absent = [name for name in names if name not in exports[source]]
            if absent:
                raise ValueError(f"{path} imports {absent}, which {source} does not export")
            return f"const {{ {', '.join(names)} }} = {_variable(source)};\n"

        text = _IMPORT.sub(replace_import, text)
        exports[path] = [match[1] for match in _EXPORT.finditer(text)]
        text = _EXPORT.sub("", text)
        if (stray_statement := _OTHER.search(text)) is not None:
            raise ValueError(
                f"{path}: {stray_statement[0]!r} must import names or export a declaration"
            )
        names = ", ".join(exports[path])
        parts.append(f"// {path}\nconst {_variable(path)} = (() => {{\n{text}")
        parts.append(f"return {{ {names} }};\n}})();\n")
        active.pop()

    add(main)
    return "\n".join(parts)


def _variable(path: str) -> str:
    return "module_" + re.sub(r"\W", "_", path.removesuffix(".js"))
