"""Tiny configurations of mamba2."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "groups": {
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
        "biases, no bias of the convolution, tied": {
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 6,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "residual_in_fp32": False,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
