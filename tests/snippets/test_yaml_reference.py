"""docs/yaml.md equals the page generated from the option classes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools import yaml_reference
from tools.workspace import ROOT


def test_yaml_page_is_up_to_date() -> None:
    assert yaml_reference.page() == yaml_reference.PAGE.read_text(encoding="utf-8"), (
        "run: uv run python -m tools.yaml_reference"
    )


def test_yaml_page_lists_every_section_and_action() -> None:
    from ed_elarge.config.table import ACTIONS, SECTIONS

    text = yaml_reference.PAGE.read_text(encoding="utf-8")
    for name in SECTIONS:
        assert f"## `{name}" in text
    for name in ACTIONS:
        assert f"| `{name}` |" in text


@pytest.mark.nightly
def test_yaml_reference_does_not_import_jax() -> None:
    code = "import sys, tools.yaml_reference as r; r.reference(); print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
