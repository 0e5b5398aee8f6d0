"""Conformance cases of ELECTRA."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

CASES = Cases(
    {
        "small embeddings": {**TINY_ENCODER, "embedding_size": 16},
        "equal sizes": {**TINY_ENCODER, "embedding_size": 32},
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
