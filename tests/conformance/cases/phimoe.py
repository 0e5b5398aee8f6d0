"""Tiny configurations of phimoe."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "two of eight, biases": {
            "num_local_experts": 8,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,
        },
        "longrope, window": {
            "num_local_experts": 4,
            "router_jitter_noise": 0.3,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 6.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    }
)
