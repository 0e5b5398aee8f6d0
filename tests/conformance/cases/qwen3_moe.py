"""Tiny configurations of qwen3_moe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "normalized, own head size": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 12,
        },
        "every second layer, biases, window": {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    }
)
