"""Tiny configurations of lfm2_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "two dense layers": {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.5,
        },
        "four taps, no bias, tied": {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    }
)
