"""Conformance cases of M2M-100."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "m2m": {**TINY_BART, "scale_embedding": True, "activation_function": "relu"},
    },
    padded_in_transformers=False,
    tiny=False,
)
