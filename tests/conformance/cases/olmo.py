"""Tiny configurations of olmo."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "clipped projections": {"clip_qkv": 0.3},
        "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    }
)
