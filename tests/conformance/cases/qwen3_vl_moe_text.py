"""Tiny configurations of qwen3_vl_moe_text."""

from ed_models.conformance import Cases

ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}

CASES = Cases(
    {
        "biases": {
            "head_dim": 8,
            "attention_bias": True,
            "rope_parameters": ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        }
    }
)
