"""Tiny configurations of afmoe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "attention_bias": True,
            "mup_enabled": True,
            "tie_word_embeddings": True,
        }
    }
)
