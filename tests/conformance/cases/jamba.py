"""Tiny configurations of jamba."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "attention and experts in every second layer": {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
        },
        "attention after experts, tied": {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "expert_layer_period": 3,
            "expert_layer_offset": 0,
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 3,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    },
    # torch in float32 differs from float64 by 1.5e-5, so two programs differ by up to 3e-5
    ours=3e-5,
)
