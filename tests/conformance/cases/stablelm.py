"""Tiny configurations of stablelm."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, half of a head turns": {
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "side by side, query and key norms, tied": {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
        },
    }
)
