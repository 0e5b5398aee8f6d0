"""Tiny configurations of recurrent_gemma."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "one key head, tied": {
            "num_key_value_heads": 1,
            "attention_window_size": 6,
            "tie_word_embeddings": True,
        },
        "own width, biases": {
            "num_hidden_layers": 4,
            "block_types": ["attention", "recurrent"],
            "attention_window_size": 5,
            "attention_bias": True,
            "lru_width": 24,
            "conv1d_width": 3,
            "logits_soft_cap": 4.0,
        },
    },
    padded_in_transformers=False,
)
