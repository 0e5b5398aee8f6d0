"""Tiny configurations of glm."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "half of a head turns": {"head_dim": 8},
        "own head size, no biases, tied": {
            "head_dim": 12,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
            "tie_word_embeddings": True,
        },
    }
)
