"""Write `easydel/__init__.pyi`, from which editors and type checkers know `import easydel as ed`.

uv run python -m tools.easydel_stub            rewrite the file
uv run python -m tools.easydel_stub --check    exit 1 if the file is outdated

The umbrella imports its names lazily from a table, which type checkers cannot read. The stub
imports each name from the module of the table. A class that the registry derives from a family,
such as `LlamaForSequenceClassification`, is the class of its task.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from easydel._found import DERIVED_CLASSES, list_names
from easydel._other_names import MECHANISM_NAMES
from easydel._table import NAMES, children

from tools.workspace import ROOT

FILE = ROOT / "packages/ed-elarge/src/easydel/__init__.pyi"
_STATES = "ed_trainers.auto_state"
_BEGIN = """\
# Written by tools/easydel_stub.py.
# ruff: noqa
# fmt: off
from types import ModuleType
"""


def list_lines() -> Iterator[str]:
    """Yield the lines after the beginning: imports, derived classes, mechanisms, submodules."""
    aliases: dict[str, str] = {}
    table = {**list_names(), **NAMES}
    for name, place in sorted(table.items()):
        module, _, attribute = place.partition(":")
        if name in MECHANISM_NAMES:
            aliases[name] = "_Mechanism"
        elif module == "easydel._found":
            of = attribute or name
            end = next(end for end in sorted(DERIVED_CLASSES, key=len) if of.endswith(end))
            aliases[name] = f"_{end}"
        elif module == _STATES and name != "AutoState":
            aliases[name] = "AutoState"  # made for each class of models at the first use
        else:
            parent, _, last = module.rpartition(".")
            source, of = (parent, last) if attribute == "*" else (module, attribute or name)
            # A stub exports an import only if its name does not change.
            is_same = of == name
            yield f"from {source} import {of} as {name if is_same else f'_{name}'}"
            aliases |= {} if is_same else {name: f"_{name}"}
    yield "from ed_layers.attention import Mechanism as _Mechanism"
    for end, place in DERIVED_CLASSES.items():
        module, _, cls = place.partition(":")
        yield f"from {module} import {cls} as _{end}"
    for name, target in aliases.items():
        yield f"{name}: _Mechanism" if target == "_Mechanism" else f"{name} = {target}"
    for name in children("easydel"):
        if name not in table:
            yield f"{name}: ModuleType"


def write_stub() -> str:
    """Return the text of the file."""
    return _BEGIN + "".join(f"{line}\n" for line in list_lines())


def main() -> int:
    """Rewrite the file, or compare it."""
    text = write_stub()
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE.relative_to(ROOT)} is outdated: run python -m tools.easydel_stub")
    return 1


if __name__ == "__main__":
    sys.exit(main())
