"""Tiny configurations of ministral3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "yarn, scaled queries": {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "window, tied": {"sliding_window": 6, "tie_word_embeddings": True},
    }
)
