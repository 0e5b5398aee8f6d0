"""Tiny configurations of mpt."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "ALiBi": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "max_seq_len": 128,
            "tie_word_embeddings": True,
        },
        "heads no power of two, clipped": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "max_seq_len": 128,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
        },
    }
)
