"""Tiny configurations of glm4_moe_lite."""

from ed_models.conformance import Cases

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "moe_intermediate_size": 12,
}

CASES = Cases(
    {
        "layer types, groups": {
            **_LATENT,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "q_lora_rank": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
        },
        "halves turn, biases": {
            **_LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
        },
    }
)
