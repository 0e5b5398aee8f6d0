"""Mutations that remove the defenses of `docs/advisories.md`: replaced texts, and the files.

A mutation replaces texts of files. `test_advisory_mutations.py` checks that the test of the row
fails with its mutation, in a copy of the repository.
"""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A replaced text, which occurs once in its file.

    Attributes:
        file: path of the file in the repository.
        old: the text.
        new: the replacement.
    """

    file: str
    old: str
    new: str


DATA = "packages/ed-data/src/ed_data"
ELARGE = "packages/ed-elarge/src/ed_elarge"
ESURGE = "packages/ed-esurge/src/ed_esurge"
LAYERS = "packages/ed-layers"
INFRA = "packages/ed-infra/src/ed_infra"
MODELS = "packages/ed-models/src/ed_models"
TRAINERS = "packages/ed-trainers/src/ed_trainers"
CLASSES = "tests/security/test_advisory_classes.py"
BAD_CHECKPOINTS = "packages/ed-models/tests/test_models_bad_checkpoints.py"
ESURGE_TESTS = "packages/ed-esurge/tests"
_WIRE = f"{ESURGE}/engine/wire.py"
_WIRE_LINE = "TUPLE, FROZENSET, OBJECT, ARRAY, ERROR = range(5)\n"
_ADMISSION = f"{ESURGE}/server/http/admission.py"
