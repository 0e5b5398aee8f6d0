"""Tiny configurations of phi3."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "window, part of a head turns": {
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "long contexts": {
            "original_max_position_embeddings": 6,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 3.0, 5.0],
            },
        },
    }
)
