"""Torch models are created once for each module of tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Return case name -> `llama_cases.Reference`, created on first use."""
    pytest.importorskip("torch")
    from tests.parity import llama_cases

    made = {}

    def get(name: str):
        if name not in made:
            made[name] = llama_cases.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get
