"""Tiny configurations of olmo3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows": {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "biases, tied": {
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
