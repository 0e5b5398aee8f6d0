"""Tiny configurations of llava_onevision."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT, VISION

GRIDS = {
    "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16]],
    "image_token_index": 159,
    "video_token_index": 158,
    "eos_token_id": 2,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN2 = {**TEXT, "model_type": "qwen2"}

CASES = Cases(
    {
        "reduced grid": {
            "text_config": QWEN2,
            "vision_config": SIGLIP,
            "vision_aspect_ratio": "anyres_max_1",
            **GRIDS,
        },
        "CLIP, two layers, tied": {
            "text_config": {**QWEN2, "tie_word_embeddings": True},
            "vision_config": VISION,
            "vision_feature_layer": [1, -1],
            "vision_feature_select_strategy": "default",
            "vision_aspect_ratio": "anyres_max_9",
            "tie_word_embeddings": True,
            **GRIDS,
        },
    },
    tiny=False,
)
