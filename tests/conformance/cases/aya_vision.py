"""Tiny configurations of aya_vision."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "cohere2",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}

CASES = Cases(
    {
        "tied": {
            "text_config": TEXT,
            "vision_config": VISION,
            "image_token_index": 159,
            "eos_token_id": 2,
        },
        "layer but one, patches are not joined": {
            "text_config": TEXT,
            "vision_config": {**VISION, "image_size": 8},
            "vision_feature_layer": -2,
            "downsample_factor": 1,
            "alignment_intermediate_size": 24,
            "image_token_index": 159,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
