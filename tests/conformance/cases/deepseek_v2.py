"""Tiny configurations of deepseek_v2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "groups, yarn": {
            "num_hidden_layers": 4,
            "num_key_value_heads": None,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 12,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 16,
            },
        },
        "lite, biases": {
            "num_key_value_heads": None,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 6,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "attention_bias": True,
            "mlp_bias": True,
        },
    }
)
