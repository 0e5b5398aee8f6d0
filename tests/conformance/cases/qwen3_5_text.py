"""Tiny configurations of qwen3_5_text."""

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
        },
        "sections, biases, tied": {
            "rms_norm_eps": 0.5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 2, 2],
                "mrope_interleaved": True,
            },
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    }
)
