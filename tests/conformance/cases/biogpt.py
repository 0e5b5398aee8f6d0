"""Tiny configurations of biogpt."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "scaled embeddings, tied": {
            "num_key_value_heads": None,
            "scale_embedding": True,
            "tie_word_embeddings": True,
        },
    }
)
