"""Tiny configurations of falcon_mamba."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "norms in the mixer": {
            "state_size": 8,
            "intermediate_size": None,
            "mixer_rms_eps": 0.05,
        },
        "biases, tied": {
            "state_size": 6,
            "conv_kernel": 3,
            "time_step_rank": 3,
            "intermediate_size": None,
            "num_hidden_layers": 2,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
