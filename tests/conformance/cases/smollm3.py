"""Tiny configurations of smollm3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "every other layer without positions": {"no_rope_layer_interval": 2},
        "windows, biases, tied": {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
