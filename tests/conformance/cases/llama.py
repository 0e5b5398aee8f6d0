"""Tiny configurations of llama."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "biases, llama3 rope": {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "tied": {"tie_word_embeddings": True},
    }
)
