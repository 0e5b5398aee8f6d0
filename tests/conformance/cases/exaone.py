"""Tiny configurations of exaone."""

from ed_models.conformance import Cases

_NAMES = {"num_hidden_layers": None, "num_layers": 3}

CASES = Cases(
    {
        "llama3 positions": {
            **_NAMES,
            "head_dim": 12,
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "tied": {**_NAMES, "intermediate_size": None, "tie_word_embeddings": True},
    }
)
