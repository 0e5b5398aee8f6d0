"""The toy model and its loader, for every test of this package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `toys`, `method_runs`: what tests share
from toys import VOCAB, ToyConfig, ToyLoader, ToyModel


@pytest.fixture(scope="session")
def toy():
    """The toy's parts: `toy.model(dims)`, `toy.loader(...)`, `toy.Model`, `toy.Config`."""
    return SimpleNamespace(
        model=lambda dims=(1, 1, 1, 1, 1), **kw: ToyModel(ToyConfig(dims), **kw).shard_model(),
        loader=ToyLoader,
        Model=ToyModel,
        Config=ToyConfig,
        vocab=VOCAB,
    )
