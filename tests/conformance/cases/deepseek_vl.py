"""Tiny configurations of deepseek_vl."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT, VISION

SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
TOKENS = {"image_token_id": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "two heads": {
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        "biases, tied": {
            "text_config": {**TEXT, "attention_bias": True},
            "vision_config": {**SIGLIP, "num_hidden_layers": 2},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
