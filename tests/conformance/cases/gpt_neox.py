"""Tiny configurations of gpt_neox."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "side by side": {"num_key_value_heads": None},
        "one after another, no biases, tied": {
            "num_key_value_heads": None,
            "use_parallel_residual": False,
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
