"""Every model type of EasyDeL has a place on the page about moving from EasyDeL."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess

import pytest
from easydel._found import list_names
from easydel._table import NAMES
from ed_elarge.config.architectures import list_architectures

from tools import easydel_stub
from tools.easydel_types import ELSEWHERE, SAME_TYPES, families, type_table

#: Prints the model types that an installed EasyDeL registers, as JSON.
_LIST_TYPES = r"""
import importlib.util, json, pathlib, re
folder = pathlib.Path(importlib.util.find_spec("easydel").origin).parent / "modules"
pattern = re.compile(r"register_config\(\s*[\x22\x27]([^\x22\x27]+)")
texts = (path.read_text("utf-8") for path in folder.rglob("*.py"))
print(json.dumps(sorted({name for text in texts for name in pattern.findall(text)})))
"""


def test_model_type_of_easydel_is_a_family_or_names_one() -> None:
    registered = {*list_architectures()}
    assert {*SAME_TYPES} <= registered
    assert {*SAME_TYPES} <= families().keys()
    assert not {*ELSEWHERE} & registered, "the family exists now: move the type to SAME_TYPES"
    for name, text in ELSEWHERE.items():
        named = [word for word in re.findall(r"`([a-z0-9_-]+)`", text) if "-" not in word]
        assert {*named} <= registered, name
        assert named or text.startswith("not here"), name


def test_table_names_every_model_type_once() -> None:
    first_cells = [line.split("|")[1] for line in type_table()[2:]]
    names = re.findall(r"`([^`]+)`", "".join(first_cells))
    assert sorted(names) == sorted([*SAME_TYPES, *ELSEWHERE])


def test_stub_of_the_umbrella_has_its_names() -> None:
    text = easydel_stub.FILE.read_text("utf-8")
    assert text == easydel_stub.write_stub(), "run: uv run python -m tools.easydel_stub"
    nodes = ast.parse(text).body
    targets = [node.targets[0] for node in nodes if isinstance(node, ast.Assign)]
    targets += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    # A stub exports an import only if its name does not change.
    imports = [one for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    names = {ast.unparse(one) for one in targets}
    names |= {one.name for one in imports if one.name == one.asname}
    assert {*NAMES, *list_names()} <= names


@pytest.mark.nightly
def test_model_types_are_those_of_the_installed_easydel() -> None:
    interpreter = os.environ.get("EASYDEL_PYTHON")
    if not interpreter:
        pytest.skip("EASYDEL_PYTHON names no interpreter with easydel")
    others = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [interpreter, "-c", _LIST_TYPES]
    output = subprocess.run(
        command, env=others | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True
    )
    assert json.loads(output.stdout.splitlines()[-1]) == sorted([*SAME_TYPES, *ELSEWHERE])
