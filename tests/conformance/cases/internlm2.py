"""Tiny configurations of internlm2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "groups, no biases": {"bias": False},
        "biases, linear positions, tied": {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "tie_word_embeddings": True,
        },
    }
)
