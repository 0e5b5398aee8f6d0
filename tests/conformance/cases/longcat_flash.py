"""Tiny configurations of longcat_flash."""

from ed_models.conformance import Cases

_LATENT = {
    "num_hidden_layers": None,
    "num_key_value_heads": 4,
    "intermediate_size": None,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "expert_ffn_hidden_size": 12,
}

CASES = Cases(
    {
        "experts that do nothing": {
            **_LATENT,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "routed_scaling_factor": 2.0,
        },
        "biases, all experts work": {
            **_LATENT,
            "attention_bias": True,
            "n_routed_experts": 6,
            "zero_expert_num": 0,
            "moe_topk": 2,
        },
    }
)
