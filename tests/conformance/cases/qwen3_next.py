"""Tiny configurations of qwen3_next."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "two value heads for a key head": {
            "rms_norm_eps": 0.5,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        "dense layers, biases": {
            "rms_norm_eps": 0.5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 12,
            "norm_topk_prob": False,
            "mlp_only_layers": [0, 1],
        },
    }
)
