"""Conformance cases of T5Gemma."""

from ed_models.conformance import Cases

_SIDE = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OTHER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 5.0,
    "attention_bias": True,
}
_TINY = {"vocab_size": 160, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CASES = Cases(
    {
        "equal sides": {**_TINY, "encoder": _SIDE, "decoder": _SIDE},
        "another decoder, separate head": {
            **_TINY,
            "encoder": _SIDE,
            "decoder": {**_SIDE, **_OTHER},
            "tie_word_embeddings": False,
        },
    },
    tiny=False,
)
