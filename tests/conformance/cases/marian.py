"""Conformance cases of Marian."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "opus-mt": {**TINY_BART, "scale_embedding": True, "activation_function": "silu"},
        "opus-mt: decoders start with the padding token": {
            **TINY_BART,
            "pad_token_id": 3,
            "decoder_start_token_id": 3,
            "scale_embedding": True,
            "activation_function": "swish",
        },
        "separate vocabularies": {
            **TINY_BART,
            "share_encoder_decoder_embeddings": False,
            "decoder_vocab_size": 170,
        },
    },
    padded_in_transformers=False,
    tiny=False,
)
