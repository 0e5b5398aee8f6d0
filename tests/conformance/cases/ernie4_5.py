"""Tiny configurations of ernie4_5."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "tied": {"head_dim": 8, "tie_word_embeddings": True},
        "own head size, biases": {"head_dim": 12, "use_bias": True},
    }
)
