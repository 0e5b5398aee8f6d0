"""Tiny configurations of falcon_h1."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "multipliers": {
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.5],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.2, 0.6, 1.4, 0.7],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
        },
        "norm before the gate, biases, tied": {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
