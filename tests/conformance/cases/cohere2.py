"""Tiny configurations of cohere2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows": {
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        "biases": {
            "head_dim": 8,
            "sliding_window": 5,
            "attention_bias": True,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
    }
)
