"""The mutations of all rows of `docs/advisories.md`, by the test of a row.

A mutation replaces texts of files. `test_advisory_mutations.py` checks that the test of the row
fails with its mutation, in a copy of the repository.
"""

from __future__ import annotations

from tests.security.defenses.advisories import ADVISORIES
from tests.security.defenses.attacks import ATTACKS

MUTATIONS = {**ADVISORIES, **ATTACKS}

#: Tests of rows without a mutation. Add the reason.
WITHOUT_MUTATION: tuple[str, ...] = ()
