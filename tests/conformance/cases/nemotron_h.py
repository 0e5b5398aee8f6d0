"""Tiny configurations of nemotron_h."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "all kinds of layers, groups": {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
            "head_dim": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
        "latent experts, biases": {
            "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
            "n_routed_experts": 3,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "moe_latent_size": 16,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
        },
    },
    padded_in_transformers=False,
)
