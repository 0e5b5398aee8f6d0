"""Tiny configurations of dbrx."""

from ed_models.conformance import Cases

_NAMES = {"d_model": 32, "num_key_value_heads": None, "intermediate_size": None}

CASES = Cases(
    {
        "clipped": {
            **_NAMES,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
        },
        "weights of norm 2": {
            **_NAMES,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": 2.0,
            },
        },
    }
)
