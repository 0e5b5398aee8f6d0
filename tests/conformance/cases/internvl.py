"""Tiny configurations of internvl."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "qwen2",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}

CASES = Cases(
    {
        "no norm after the last layer, tied": {
            "text_config": {**TEXT, "tie_word_embeddings": True},
            "vision_config": VISION,
            "image_token_id": 159,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "norms of queries and keys, biases, norm after the last layer": {
            "text_config": TEXT,
            "vision_config": {
                **VISION,
                "image_size": 8,
                "norm_type": "rms_norm",
                "use_qk_norm": True,
                "attention_bias": True,
                "use_mean_pooling": False,
                "use_mask_token": True,
            },
            "downsample_ratio": 1.0,
            "image_token_id": 159,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
        "last layer but one": {
            "text_config": TEXT,
            "vision_config": VISION,
            "vision_feature_layer": -2,
            "image_token_id": 159,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
