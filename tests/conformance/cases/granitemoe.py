"""Tiny configurations of granitemoe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "multipliers": {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
        "biases, tied": {
            "attention_multiplier": 0.3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
    }
)
