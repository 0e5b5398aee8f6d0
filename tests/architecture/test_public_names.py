"""The public names of each package exist, have docstrings, and are visible to type checkers."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tools.workspace import packages

# ed-elarge's module `easydel` repeats EasyDeL's names; tests of ed-elarge check it.
MODULES = [m for p in packages() for m in p.modules if m.startswith("ed_")]


def imported_for_type_checkers(init: Path) -> set[str]:
    """Return the names imported under `if TYPE_CHECKING:`."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    guarded = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    )
    imports = (node for block in guarded for node in ast.walk(block))
    return {
        alias.asname or alias.name
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented_and_exported(module: str) -> None:
    package = importlib.import_module(module)
    assert package.__all__, "__all__ must list the public names"
    assert sorted(set(package.__all__)) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    mute = [
        name
        for name in package.__all__
        if callable(value := getattr(package, name)) and not getattr(value, "__doc__", None)
    ]
    assert not mute, "public classes and functions have docstrings"
    assert imported_for_type_checkers(Path(str(package.__file__))) == set(package.__all__)
    with pytest.raises(AttributeError, match=f"did you mean '{package.__all__[0]}'"):
        getattr(package, package.__all__[0] + "x")
