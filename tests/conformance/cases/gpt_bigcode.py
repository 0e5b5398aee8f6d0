"""Tiny configurations of gpt_bigcode."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "one key head, own inner size, tied": {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "n_inner": 48,
            "tie_word_embeddings": True,
        },
    }
)
