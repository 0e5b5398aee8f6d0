"""Tiny configurations of exaone4_5."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT
from tests.conformance.cases.qwen2_5_vl import VISION

EXAONE = {
    **TEXT,
    "model_type": "exaone4",
    "head_dim": 8,
    "sliding_window": 6,
    "sliding_window_pattern": None,
    "layer_types": ["sliding_attention", "full_attention"],
}
TOWER = {**VISION, "num_heads": 6, "num_key_value_heads": 2}
TOKENS = {"image_token_id": 156, "video_token_id": 157, "eos_token_id": 2}

CASES = Cases(
    {
        "groups of heads in the tower": {
            "text_config": EXAONE,
            "vision_config": TOWER,
            "tie_word_embeddings": False,
            **TOKENS,
        },
        "no groups, no windows, tied": {
            "text_config": {
                **EXAONE,
                "sliding_window": None,
                "layer_types": ["full_attention"] * 2,
            },
            "vision_config": {**VISION, "num_key_value_heads": 3, "fullatt_block_indexes": [0, 2]},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
