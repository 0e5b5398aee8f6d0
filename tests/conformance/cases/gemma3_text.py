"""Tiny configurations of gemma3_text."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "both kinds of layers": {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        "scaled positions in full layers": {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
            "tie_word_embeddings": True,
        },
    }
)
