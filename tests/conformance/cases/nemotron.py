"""Tiny configurations of nemotron."""

from ed_models.conformance import Cases

# Norm weights near two and random weights produce sharp scores; a large eps reduces them.
CASES = Cases(
    {
        "half of a head turns": {"norm_eps": 0.5},
        "own head size, biases, tied": {
            "num_hidden_layers": 2,
            "head_dim": 12,
            "norm_eps": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    }
)
