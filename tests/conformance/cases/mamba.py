"""Tiny configurations of mamba."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "tied": {
            "state_size": 8,
            "intermediate_size": None,
            "tie_word_embeddings": True,
        },
        "biases, no bias of the convolution": {
            "state_size": 5,
            "conv_kernel": 3,
            "time_step_rank": 3,
            "intermediate_size": None,
            "num_hidden_layers": 2,
            "use_bias": True,
            "use_conv_bias": False,
            "residual_in_fp32": False,
        },
    },
    padded_in_transformers=False,
)
