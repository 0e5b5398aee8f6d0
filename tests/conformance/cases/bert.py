"""Conformance cases of BERT."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

CASES = Cases(
    {
        "encoder": TINY_ENCODER,
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
