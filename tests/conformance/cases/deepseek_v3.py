"""Tiny configurations of deepseek_v3."""

from ed_models.conformance import Cases

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

CASES = Cases(
    {
        "groups, yarn": {
            **_LATENT,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
        "queries not compressed, halves turn, biases": {
            **_LATENT,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "v_head_dim": 24,
            "rope_interleave": False,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    }
)
