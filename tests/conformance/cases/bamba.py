"""Tiny configurations of bamba."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "groups": {
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
        },
        "biases, tied": {
            "attn_layer_indices": [2],
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
