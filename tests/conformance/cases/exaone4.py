"""Tiny configurations of exaone4."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows": {
            "head_dim": 8,
            "sliding_window": 6,
            "sliding_window_pattern": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "no windows, tied": {
            "head_dim": 8,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    }
)
