"""Tiny configurations of glm4v_moe_text."""

from ed_models.conformance import Cases

EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
}

CASES = Cases(
    {
        "half of each head turns": {
            **EXPERTS,
            "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        }
    }
)
