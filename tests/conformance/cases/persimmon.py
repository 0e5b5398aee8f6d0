"""Tiny configurations of persimmon."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "norms, tied": {
            "num_key_value_heads": None,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
        }
    }
)
