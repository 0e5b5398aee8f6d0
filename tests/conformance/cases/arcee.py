"""Tiny configurations of arcee."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {"head_dim": 12},
        "biases, tied": {
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
