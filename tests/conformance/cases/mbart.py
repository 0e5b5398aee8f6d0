"""Conformance cases of mBART."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "mbart-large": {**TINY_BART, "scale_embedding": True},
    },
    padded_in_transformers=False,
    tiny=False,
)
