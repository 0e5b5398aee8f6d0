"""Conformance cases of Moonshine."""

from ed_models.conformance import Cases

_TINY = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 3,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

CASES = Cases(
    {
        "tiny": _TINY,
        "biases, fewer layers of the decoder": {
            **_TINY,
            "attention_bias": True,
            "decoder_num_hidden_layers": 2,
            "pad_head_dim_to_multiple_of": 16,
        },
    },
    tiny=False,
)
