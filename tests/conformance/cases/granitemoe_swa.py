"""Tiny configurations of granitemoe_swa."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [10000.0, 0, 500000.0],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
