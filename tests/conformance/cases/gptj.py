"""Tiny configurations of gptj."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "half of a head turns": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "rotary_dim": 4,
        },
        "whole heads turn, own size": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_inner": 48,
            "rotary_dim": 8,
        },
    }
)
