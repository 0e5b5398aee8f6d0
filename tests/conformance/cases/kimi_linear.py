"""Tiny configurations of kimi_linear."""

from ed_models.conformance import Cases

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 0.1,
}

CASES = Cases(
    {
        "experts in groups": {
            **_LATENT,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
        },
        "compressed queries, two dense layers": {
            **_LATENT,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "q_lora_rank": 20,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "linear_num_heads": 3,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
        },
    }
)
