"""Tiny configurations of gpt2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "tied": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "tie_word_embeddings": True,
        },
        "scores by layer, own sizes": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_inner": 48,
            "scale_attn_by_inverse_layer_idx": True,
        },
    }
)
