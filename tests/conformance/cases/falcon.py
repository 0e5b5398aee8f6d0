"""Tiny configurations of falcon."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "grouped queries, a norm for each branch": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "tie_word_embeddings": True,
        },
        "one key head, one norm": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_hidden_size": 48,
            "bias": True,
        },
        "ALiBi, one after another": {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "hidden_size": 48,
            "num_attention_heads": 12,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "tie_word_embeddings": True,
        },
    }
)
