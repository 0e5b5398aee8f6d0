"""Tiny configurations of idefics3."""

from ed_models.conformance import Cases

TEXT = {
    "model_type": "llama",
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
        "tied": {
            "text_config": {**TEXT, "tie_word_embeddings": True},
            "vision_config": VISION,
            "image_token_id": 159,
            "scale_factor": 2,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "patches are not joined": {
            "text_config": TEXT,
            "vision_config": {**VISION, "image_size": 8},
            "image_token_id": 159,
            "scale_factor": 1,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
