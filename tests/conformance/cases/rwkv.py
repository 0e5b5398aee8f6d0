"""Tiny configurations of rwkv."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "sizes by default": {"intermediate_size": None},
        "wider time mixing, tied": {
            "num_hidden_layers": 2,
            "attention_hidden_size": 48,
            "intermediate_size": 40,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
    },
    padded_in_transformers=False,
)
