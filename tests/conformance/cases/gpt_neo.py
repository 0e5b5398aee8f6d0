"""Tiny configurations of gpt_neo."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "own inner size, tied": {
            "num_key_value_heads": None,
            "window_size": 6,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "tie_word_embeddings": True,
        },
    }
)
