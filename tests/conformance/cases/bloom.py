"""Tiny configurations of bloom."""

from ed_models.conformance import Cases

_NAMES = {
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
}

CASES = Cases(
    {
        "tied": {**_NAMES, "tie_word_embeddings": True},
        "heads no power of two, residual after the norm": {
            **_NAMES,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "apply_residual_connection_post_layernorm": True,
        },
    }
)
