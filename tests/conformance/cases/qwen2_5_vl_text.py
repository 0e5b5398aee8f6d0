"""Tiny configurations of qwen2_5_vl_text."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases": {
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        "windows, tied": {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    }
)
