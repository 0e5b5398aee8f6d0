"""Tiny configurations of grok-1."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "tied": {"num_experts": 6, "tie_word_embeddings": True},
        "three of four, low cap": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "max_attn_value": 2.0,
            "attn_output_multiplier": 0.5,
            "embedding_multiplier_scale": 3.0,
        },
    }
)
