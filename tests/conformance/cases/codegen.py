"""Tiny configurations of codegen."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "rotary_dim": 4,
            "tie_word_embeddings": False,
        },
        "own inner size": {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "n_inner": 48,
            "rotary_dim": 6,
            "tie_word_embeddings": False,
        },
    }
)
