"""Conformance cases of mBART."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "mbart-large": {**TINY_BART, "scale_embedding": True},
        "separate tables, fewer layers of the decoder": {
            **TINY_BART,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "decoder_layers": 1,
        },
    },
    padded_in_transformers=False,
    tiny=False,
)
