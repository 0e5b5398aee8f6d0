"""Conformance cases of T5."""

from ed_models.conformance import Cases

TINY_T5 = {
    "vocab_size": 160,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}

CASES = Cases(
    {
        "v1.0, tied": TINY_T5,
        "Flan-T5: v1.1, odd sizes, one decoder layer": {
            **TINY_T5,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_decoder_layers": 1,
            "d_kv": 7,
            "relative_attention_num_buckets": 6,
            "n_positions": 512,
        },
        "v1.1, gated, separate head, two decoder layers": {
            **TINY_T5,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "num_decoder_layers": 2,
        },
    },
    ours=2e-4,  # scores have no scale: one device differs from float64 by 8e-5, too
    tiny=False,
)
