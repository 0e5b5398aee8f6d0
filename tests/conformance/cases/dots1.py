"""Tiny configurations of dots1."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "one dense layer": {
            "first_k_dense_replace": 1,
            "sliding_window": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "head_dim": 8,
        },
        "groups, windows, biases": {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "max_window_layers": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
    }
)
