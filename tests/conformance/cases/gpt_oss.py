"""Tiny configurations of gpt_oss."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "windows, sinks": {"num_local_experts": 6, "head_dim": 12, "sliding_window": 6},
        "two of four, clamped": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "swiglu_limit": 0.2,
            "swiglu_alpha": 1.3,
        },
    }
)
