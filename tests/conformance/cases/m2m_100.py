"""Conformance cases of M2M-100."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "m2m": {**TINY_BART, "scale_embedding": True, "activation_function": "relu"},
        "NLLB: ReLU, scaled embeddings, other sizes, separate tables": {
            **TINY_BART,
            "scale_embedding": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "encoder_attention_heads": 2,
            "decoder_layers": 2,
            "max_length": 200,
        },
    },
    padded_in_transformers=False,
    tiny=False,
)
