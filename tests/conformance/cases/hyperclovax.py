"""Tiny configurations of hyperclovax."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    }
)
