"""Conformance cases of ALBERT."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

CASES = Cases(
    {
        "one layer": {**TINY_ENCODER, "embedding_size": 16},
        "two layers, gelu": {
            **TINY_ENCODER,
            "embedding_size": 32,
            "inner_group_num": 2,
            "hidden_act": "gelu",
        },
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
