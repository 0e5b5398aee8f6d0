"""Conformance cases of BART."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "large": TINY_BART,
        "scaled embeddings, other sizes of the decoder": {
            **TINY_BART,
            "scale_embedding": True,
            "activation_function": "relu",
            "decoder_layers": 2,
            "decoder_ffn_dim": 40,
            "decoder_attention_heads": 2,
        },
    },
    padded_in_transformers=False,
    tiny=False,
)
