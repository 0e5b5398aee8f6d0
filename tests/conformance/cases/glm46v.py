"""Tiny configurations of glm46v."""

from ed_models.conformance import Cases

from tests.conformance.cases.glm4v import TEXT, TOKENS, VISION

CASES = Cases(
    {
        "half of each head turns": {"text_config": TEXT, "vision_config": VISION, **TOKENS},
        "biases in the tower, tied": {
            "text_config": TEXT,
            "vision_config": {**VISION, "attention_bias": True, "image_size": 12},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
