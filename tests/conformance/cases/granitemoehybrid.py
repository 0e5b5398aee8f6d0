"""Tiny configurations of granitemoehybrid."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "experts, multipliers": {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        "no experts, rotary positions, biases, tied": {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 6,
            "mamba_proj_bias": True,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
