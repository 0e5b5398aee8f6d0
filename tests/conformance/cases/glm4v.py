"""Tiny configurations of glm4v."""

from ed_models.conformance import Cases

TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
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
    "image_size": 20,
    "patch_size": 4,
}
TOKENS = {
    "image_token_id": 154,
    "video_token_id": 155,
    "image_start_token_id": 156,
    "image_end_token_id": 157,
    "video_start_token_id": 158,
    "video_end_token_id": 159,
    "eos_token_id": 2,
}

CASES = Cases(
    {
        "half of each head turns": {"text_config": TEXT, "vision_config": VISION, **TOKENS},
        "biases in the tower, tied": {
            "text_config": {
                **TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 2, 2],
                },
            },
            "vision_config": {**VISION, "attention_bias": True, "image_size": 12},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
