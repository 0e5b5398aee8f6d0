"""Conformance cases of XLM-RoBERTa."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

CASES = Cases(
    {
        "encoder": {**TINY_ENCODER, "pad_token_id": 1},
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
