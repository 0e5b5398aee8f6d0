"""Tiny configurations of glm4_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "groups": {
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 8,
        },
        "biases, norms, two dense layers": {
            "first_k_dense_replace": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 12,
        },
    }
)
