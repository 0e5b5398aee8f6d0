"""Tiny configurations of gemma3."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "gemma3_text",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": 0,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}

CASES = Cases(
    {
        "four averages of an image, tied": {
            "text_config": TEXT,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 159,
            "eos_token_id": 2,
        },
        "windows smaller than an image": {
            "text_config": {**TEXT, "sliding_window": 3, "tie_word_embeddings": False},
            "vision_config": {**VISION, "image_size": 8},
            "mm_tokens_per_image": 4,
            "image_token_index": 159,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
