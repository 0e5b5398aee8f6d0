"""Tiny configurations of hy_v3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "head_dim": 12,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "num_hidden_layers": 4,
        },
        "biases, tied": {
            "head_dim": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
