"""Tiny configurations of llava_next."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT, VISION

GRIDS = {
    "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]],
    "image_token_index": 159,
    "eos_token_id": 2,
}

CASES = Cases(
    {
        "patches of the last layer but one": {
            "text_config": TEXT,
            "vision_config": VISION,
            **GRIDS,
        },
        "SigLIP, two layers, no bias": {
            "text_config": TEXT,
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "vision_feature_layer": [1, -1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
            **GRIDS,
        },
    },
    tiny=False,
)
