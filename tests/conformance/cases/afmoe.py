"""Tiny configurations of afmoe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "num_hidden_layers": 4,
        },
        "biases, tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "mup_enabled": True,
            "tie_word_embeddings": True,
        },
    }
)
