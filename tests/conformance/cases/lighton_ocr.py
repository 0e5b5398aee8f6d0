"""Tiny configurations of lighton_ocr."""

from ed_models.conformance import Cases

from tests.conformance.cases.llava import TEXT
from tests.conformance.cases.pixtral import VISION

QWEN3 = {**TEXT, "model_type": "qwen3", "head_dim": 8, "sliding_window": None}
TOKENS = {"image_token_id": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "images of different sizes": {
            "text_config": QWEN3,
            "vision_config": VISION,
            "tie_word_embeddings": False,
            **TOKENS,
        },
    },
    tiny=False,
)
