"""Tiny configurations of olmo2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "grouped queries": {},
        "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    }
)
