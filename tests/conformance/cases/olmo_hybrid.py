"""Tiny configurations of olmo_hybrid."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "positions, two value heads for a key head": {
            "rms_norm_eps": 0.5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "no positions, heads by default, biases": {
            "rms_norm_eps": 0.5,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
        },
    }
)
