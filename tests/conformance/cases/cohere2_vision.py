"""Tiny configurations of cohere2_vision."""

from ed_models.conformance import Cases

from tests.conformance.cases.aya_vision import TEXT, VISION

TOKENS = {"image_token_id": 159, "eos_token_id": 2}

CASES = Cases(
    {
        "tied": {
            "text_config": TEXT,
            "vision_config": VISION,
            "alignment_intermediate_size": 24,
            **TOKENS,
        },
        "patches are not joined": {
            "text_config": TEXT,
            "vision_config": {**VISION, "image_size": 8},
            "downsample_factor": 1,
            "alignment_intermediate_size": 40,
            "tie_word_embeddings": False,
            **TOKENS,
        },
    },
    tiny=False,
)
