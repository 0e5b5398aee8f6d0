"""Conformance cases of PEGASUS."""

from ed_models.conformance import TINY_BART, Cases

CASES = Cases(
    {
        "pegasus": {**TINY_BART, "scale_embedding": True, "activation_function": "relu"},
        "separate tables, decoders start with the padding token": {
            **TINY_BART,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "bos_token_id": 1,
            "tie_word_embeddings": False,
        },
    },
    padded_in_transformers=False,
    tiny=False,
)
