"""Tiny configurations of phi."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "half of a head turns": {},
        "query and key norms": {"qk_layernorm": True, "num_key_value_heads": 4},
    }
)
