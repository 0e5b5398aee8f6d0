"""Tiny configurations of gpt_bigcode."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {"intermediate_size": None, "num_key_value_heads": None},
        "tied": {
            "intermediate_size": None,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
        },
    }
)
