"""Tiny configurations of qwen2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases": {},
        "windows, tied": {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    }
)
