"""Tiny configurations of iquestcoder."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    }
)
