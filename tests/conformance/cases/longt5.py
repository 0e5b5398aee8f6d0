"""Conformance cases of LongT5."""

from ed_models.conformance import Cases

_TINY = {
    "vocab_size": 160,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "local_radius": 4,
    "global_block_size": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}

CASES = Cases(
    {
        "transient-global": {
            **_TINY,
            "encoder_attention_type": "transient-global",
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_decoder_layers": 2,
        },
        "local": _TINY,
    },
    ours=2e-4,  # scores have no scale, as in T5
    saved=2e-5,  # a model that transformers saves and loads differs by 5e-6, too
    padded_in_transformers=False,
    tiny=False,
)
