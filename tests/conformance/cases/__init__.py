"""Tiny configurations of every family of ed-models, one file per model type."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ed_models import conformance
from ed_models.conformance import Cases, Subject

_FOLDER = Path(__file__).parent


def cases(*model_types: str) -> dict[str, Cases]:
    """Return the configurations of some model types; of all files if no model type is given."""
    names = model_types or sorted(p.stem for p in _FOLDER.glob("*.py") if p.stem != "__init__")
    return {name: import_module(f"{__name__}.{name}").CASES for name in names}


def subjects(*model_types: str) -> list[Subject]:
    """Return the subjects of some model types; of all files if no model type is given."""
    return conformance.subjects(cases(*model_types))


def fields(model_type: str, row: str) -> dict[str, object]:
    """Return all fields of one configuration."""
    return {**conformance.TINY, **cases(model_type)[model_type].rows[row]}
