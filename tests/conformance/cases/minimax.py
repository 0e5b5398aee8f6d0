"""Tiny configurations of minimax."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "factors": {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
            "full_attn_alpha_factor": 0.9,
            "full_attn_beta_factor": 1.1,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
        },
        "short blocks, window, own head size": {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "head_dim": 12,
            "block_size": 8,
            "num_local_experts": 4,
            "sliding_window": 6,
        },
    }
)
