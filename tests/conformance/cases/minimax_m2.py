"""Tiny configurations of minimax_m2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "three of eight, half turns": {
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "head_dim": 12,
            "rotary_dim": 6,
        },
        "two of four, tied": {
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    }
)
