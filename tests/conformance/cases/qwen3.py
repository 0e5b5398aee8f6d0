"""Tiny configurations of qwen3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "own head size, biases": {"head_dim": 24, "attention_bias": True},
        "windows, tied": {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    }
)
