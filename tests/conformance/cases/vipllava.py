"""Tiny configurations of vipllava."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT, VISION

TOKENS = {"image_token_index": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "two layers": {
            "text_config": TEXT,
            "vision_config": VISION,
            "vision_feature_layer": [-2, 1],
            **TOKENS,
        },
        "one layer, tied": {
            "text_config": {**TEXT, "tie_word_embeddings": True},
            "vision_config": {**VISION, "hidden_act": "gelu"},
            "vision_feature_layer": -2,
            "projector_layernorm_eps": 0.1,
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
