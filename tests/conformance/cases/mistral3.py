"""Tiny configurations of mistral3."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT
from tests.conformance.cases.pixtral import VISION

MISTRAL = {**TEXT, "model_type": "mistral", "sliding_window": None}
TOKENS = {"image_token_index": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "images of different sizes": {
            "text_config": MISTRAL,
            "vision_config": VISION,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        "windows, patches as features, bias, tied": {
            "text_config": {**MISTRAL, "sliding_window": 6, "tie_word_embeddings": True},
            "vision_config": VISION,
            "spatial_merge_size": 1,
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
