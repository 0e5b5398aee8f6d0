"""Tiny configurations of apertus."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "xIELU": {},
        "biases, plain positions, tied": {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
    }
)
