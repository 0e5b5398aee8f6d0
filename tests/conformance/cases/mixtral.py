"""Tiny configurations of mixtral."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "two of eight": {},
        "three of five, window": {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
        },
    }
)
