"""Tiny configurations of codegen."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "two heads of a group, own inner size": {
            "hidden_size": 64,
            "intermediate_size": None,
            "num_attention_heads": 8,
            "num_key_value_heads": None,
            "n_inner": 48,
            "rotary_dim": 6,
        },
    }
)
