"""The mutations of all rows of `docs/advisories.md`, by the test of a row.

A mutation replaces texts of files. `test_advisory_mutations.py` checks that the test of the row
fails with its mutation, in a copy of the repository.
"""

from __future__ import annotations

from tests.security.defenses.advisories import ADVISORIES
from tests.security.defenses.attacks import ATTACKS

MUTATIONS = {**ADVISORIES, **ATTACKS}

#: Tests of rows that have no mutation yet. `test_decoding_ends_when_the_client_leaves` passes on a
#: busy machine without the cancellation, because the child may not have started.
WITHOUT_MUTATION = (
    "packages/ed-esurge/tests/test_server_cheap_requests.py"
    "::test_requests_do_not_copy_the_vocabulary",
    "tests/security/test_image_attacks.py::test_decoding_ends_when_the_client_leaves",
    "packages/ed-data/tests/test_data_media_rows.py"
    "::test_archives_of_a_dataset_read_and_write_nothing_outside",
    "packages/ed-esurge/tests/test_server_damaged_folders.py"
    "::test_lists_contain_the_healthy_models",
    "packages/ed-esurge/tests/test_server_response_memory.py"
    "::test_bytes_of_background_responses_are_counted_until_and_after_their_end",
    "packages/ed-layers/tests/test_layers_native_boundary.py"
    "::test_every_target_refuses_damaged_calls",
)
