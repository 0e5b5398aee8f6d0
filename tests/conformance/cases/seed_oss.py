"""Tiny configurations of seed_oss."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases": {"head_dim": 12, "attention_bias": True, "attention_out_bias": False},
        "all biases, tied": {
            "head_dim": 8,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
