"""Tiny configurations of glm4v_moe."""

from ed_models.conformance import Cases

from tests.conformance.cases.glm4v import TEXT, TOKENS, VISION
from tests.conformance.cases.glm4v_moe_text import EXPERTS

MOE = {**TEXT, **EXPERTS, "num_hidden_layers": 3}

CASES = Cases(
    {
        "one dense layer": {"text_config": MOE, "vision_config": VISION, **TOKENS},
        "other layers, tied": {
            "text_config": {
                **MOE,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "head_dim": 16,
                "attention_bias": False,
                "first_k_dense_replace": 0,
            },
            "vision_config": {**VISION, "attention_bias": True, "image_size": 12},
            "tie_word_embeddings": True,
            **TOKENS,
        },
    },
    tiny=False,
)
