"""Tiny configurations of qwen3_5."""

from ed_models.conformance import Cases

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 25,
}
TOKENS = {
    "image_token_id": 156,
    "video_token_id": 157,
    "vision_start_token_id": 158,
    "vision_end_token_id": 159,
    "eos_token_id": 2,
}

CASES = Cases(
    {
        "half of each head turns": {
            "text_config": TEXT,
            "vision_config": VISION,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        "attention first, biases, tied": {
            "text_config": {
                **TEXT,
                "attention_bias": True,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "rope_parameters": {
                    **ROPE,
                    "partial_rotary_factor": 1.0,
                    "mrope_section": [3, 3, 2],
                },
                "linear_num_key_heads": 4,
                "linear_conv_kernel_dim": 3,
            },
            "vision_config": {**VISION, "depth": 3, "num_position_embeddings": 16},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
