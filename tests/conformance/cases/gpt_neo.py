"""Tiny configurations of gpt_neo."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "usual fields": {
            "num_key_value_heads": None,
            "window_size": 6,
            "attention_types": [[["global", "local"], 2]],
            "num_hidden_layers": 4,
        },
        "tied": {
            "num_key_value_heads": None,
            "window_size": 6,
            "attention_types": [[["global", "local"], 2]],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
    }
)
