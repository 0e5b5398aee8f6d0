"""Tiny configurations of ministral."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        }
    }
)
