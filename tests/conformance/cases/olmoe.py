"""Tiny configurations of olmoe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "three of nine": {"num_experts": 9, "num_experts_per_tok": 3, "num_key_value_heads": 4},
        "clipped, biases, normalized": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "clip_qkv": 0.5,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    }
)
