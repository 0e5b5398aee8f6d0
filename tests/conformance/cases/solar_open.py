"""Tiny configurations of solar_open."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "intermediate_size": None,
            "head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        "biases, norms, tied": {
            "intermediate_size": None,
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    }
)
