"""Tiny configurations of gemma."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "own head size": {"head_dim": 16, "tie_word_embeddings": True},
        "biases": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    }
)
