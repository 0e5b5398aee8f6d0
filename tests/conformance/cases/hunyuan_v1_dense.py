"""Tiny configurations of hunyuan_v1_dense."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "normed last": {"head_dim": 8},
        "biases, tied": {
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
