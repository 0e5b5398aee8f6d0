"""Tiny configurations of granite."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "multipliers": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        "biases, tied": {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
