"""Tiny configurations of opt."""

from ed_models.conformance import Cases

# Without biases: the gradient of the keys' bias is zero, and torch returns its rounding error.
# packages/ed-models/tests/test_models_families.py compares biases.
CASES = Cases(
    {
        "norms before, tied": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_dim": 48,
            "enable_bias": False,
            "tie_word_embeddings": True,
        },
        "norms after, projected embeddings": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_dim": 48,
            "enable_bias": False,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 24,
        },
    }
)
