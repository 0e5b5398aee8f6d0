"""Tiny configurations of llava_next_video."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT, VISION
from tests.conformance.cases.llava_next import GRIDS

TOKENS = {**GRIDS, "video_token_index": 158}

CASES = Cases(
    {
        "patches of the last layer but one": {
            "text_config": TEXT,
            "vision_config": VISION,
            **TOKENS,
        },
        "SigLIP, two layers, no bias, tied": {
            "text_config": {**TEXT, "tie_word_embeddings": True},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "vision_feature_layer": [1, -1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
            **TOKENS,
        },
    },
    tiny=False,
)
