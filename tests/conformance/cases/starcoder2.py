"""Tiny configurations of starcoder2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "window": {"sliding_window": 6, "tie_word_embeddings": True},
        "no biases": {"use_bias": False},
    }
)
