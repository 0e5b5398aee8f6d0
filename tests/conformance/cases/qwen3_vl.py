"""Tiny configurations of qwen3_vl."""

from ed_models.conformance import Cases

TEXT = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
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
        "features of several layers": {"text_config": TEXT, "vision_config": VISION, **TOKENS},
        "one layer of the tower, biases, tied": {
            "text_config": {**TEXT, "attention_bias": True, "num_hidden_layers": 3},
            "vision_config": {**VISION, "deepstack_visual_indexes": [2]},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
