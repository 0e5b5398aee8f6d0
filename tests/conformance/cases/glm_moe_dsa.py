"""Tiny configurations of glm_moe_dsa."""

from ed_models.conformance import Cases

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 12,
    "index_n_heads": 12,
    "index_head_dim": 16,
}

CASES = Cases(
    {
        "six keys of a query": {
            **_LATENT,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "index_topk": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        "seventeen keys, biases": {
            **_LATENT,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "index_topk": 17,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    }
)
