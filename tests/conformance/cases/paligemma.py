"""Tiny configurations of paligemma."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "gemma",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
COMMON = {"image_token_index": 159, "projection_dim": 32, "eos_token_id": 2}

CASES = Cases(
    {
        "Gemma, tied": {"text_config": TEXT, "vision_config": VISION, **COMMON},
        "Gemma 2, windows and soft caps": {
            "text_config": {
                **TEXT,
                "model_type": "gemma2",
                "num_key_value_heads": 2,
                "query_pre_attn_scalar": 24,
                "sliding_window": 26,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": VISION,
            **COMMON,
        },
    },
    tiny=False,
)
