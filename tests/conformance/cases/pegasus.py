"""Conformance cases of PEGASUS."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "pegasus": {**TINY_BART, "scale_embedding": True, "activation_function": "relu"},
    },
    padded_in_transformers=False,
    tiny=False,
)
