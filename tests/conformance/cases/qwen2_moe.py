"""Tiny configurations of qwen2_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "shared expert": {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        "dense layers, windows, normalized": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
        },
    }
)
