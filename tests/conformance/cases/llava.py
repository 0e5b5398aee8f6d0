"""Tiny configurations of llava."""

from ed_models.conformance import Cases

from tests.conformance.cases.pixtral import VISION as PIXTRAL

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
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}

CASES = Cases(
    {
        "patches of the last layer but one": {
            "text_config": TEXT,
            "vision_config": VISION,
            "image_token_index": 159,
            "eos_token_id": 2,
        },
        "two layers, no bias, tied": {
            "text_config": {**TEXT, "tie_word_embeddings": True},
            "vision_config": {**VISION, "hidden_act": "gelu"},
            "image_token_index": 159,
            "vision_feature_layer": [1, -1],
            "multimodal_projector_bias": False,
            "eos_token_id": 2,
        },
        "SigLIP": {
            "text_config": TEXT,
            "vision_config": {
                **{name: value for name, value in VISION.items() if name != "model_type"},
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "vision_feature_select_strategy": "full",
            "image_token_index": 159,
            "eos_token_id": 2,
        },
        "Pixtral": {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": PIXTRAL,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "image_token_index": 159,
            "eos_token_id": 2,
        },
    },
    tiny=False,
)
