"""Tiny configurations of cwm."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, tied": {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    }
)
